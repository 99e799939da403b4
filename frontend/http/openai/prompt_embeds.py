"""A prompt as embeddings in base64: a matrix of floats as NumPy, safetensors or torch.save() write it.

No file is loaded by its own library's reader. Of each format only the form of one matrix is read, and what a file says
of its size is checked before anything of that size is made. The pickle in a file of torch.save() is not run: its list
of instructions must be the one that torch writes for a plain tensor, and its numbers are taken from there.
"""

import base64
import binascii
import io
import pickletools
import re
import zipfile
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ipc.errors import InvalidRequestError
from ipc.tables.arrays import Floats

_MAX_HEADER_BYTES = 64 << 10
_MAX_ENTRIES = 64  # of a zip file; torch writes seven for a tensor
_NPY_HEADER = re.compile(
    rb"\{'descr': '([<>])f([248])', 'fortran_order': (True|False), 'shape': \((\d{1,9}), (\d{1,9})\), \}\s*"
)
_SAFETENSORS_TYPES = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "BF16": "bf16"}
_TORCH_TYPES = {"HalfStorage": "<f2", "FloatStorage": "<f4", "DoubleStorage": "<f8", "BFloat16Storage": "bf16"}
#: What torch.save() writes for a tensor of two dimensions, without the notes of what may be needed again. Lower-case
#: words are numbers and texts that may vary.
_TORCH_PICKLE = (
    *("PROTO", "GLOBAL torch._utils _rebuild_tensor_v2", "MARK", "MARK", "BINUNICODE storage", "storage", "key"),
    *("device", "count", "TUPLE", "BINPERSID", "offset", "rows", "columns", "TUPLE2", "step_of_row", "step_of_column"),
    *("TUPLE2", "needs_grad", "GLOBAL collections OrderedDict", "EMPTY_TUPLE", "REDUCE", "TUPLE", "REDUCE", "STOP"),
)
_NOTES = ("BINPUT", "LONG_BINPUT", "MEMOIZE", "PUT", "FRAME")
_NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1")
_FORMS = "a matrix [tokens, hidden] of floats, written by numpy.save(), safetensors or torch.save()"


class _Matrix(NamedTuple):
    """Where a matrix is in its bytes. steps: between rows and between columns, as offset and count in numbers."""

    data: memoryview
    dtype: str
    shape: tuple[int, int]
    steps: tuple[int, int]
    offset: int = 0


def read_prompt_embeds(text: str, max_bytes: int) -> Floats:
    """Return the matrix [tokens, hidden] as float32. max_bytes: of it. Errors: InvalidRequestError."""
    if len(text) > (2 * max_bytes + _MAX_HEADER_BYTES) * 4 // 3:  # float64 is twice as long
        raise _wrong(f"has {len(text)} characters, and the matrix may have {max_bytes} bytes")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _wrong("is not base64") from None
    return read_matrix(data, max_bytes)


def read_matrix(data: bytes, max_bytes: int) -> Floats:
    """Return the matrix [rows, columns] in a file as float32. max_bytes: of it. Errors: InvalidRequestError."""
    if data.startswith(b"\x93NUMPY"):
        found = _of_npy(data)
    elif data.startswith(b"PK\x03\x04"):
        found = _of_torch(data)
    elif data[8:9] == b"{":
        found = _of_safetensors(data)
    else:
        raise _wrong("is of another format")
    return _values(found, max_bytes)


def _values(found: _Matrix, max_bytes: int) -> Floats:
    rows, columns = found.shape
    width = 2 if found.dtype == "bf16" else int(found.dtype[2])
    count = len(found.data) // width
    if rows < 1 or columns < 1 or 4 * rows * columns > max_bytes:
        raise _wrong(f"is of {rows} x {columns} numbers; the matrix may have {max_bytes} bytes")
    if min(*found.steps, found.offset) < 0:
        raise _wrong("has numbers before its beginning")
    if found.offset + (rows - 1) * found.steps[0] + (columns - 1) * found.steps[1] >= count:
        raise _wrong(f"says that it is of {rows} x {columns} numbers, and has {count}")
    flat = np.frombuffer(found.data, "<u2" if found.dtype == "bf16" else found.dtype, count)
    strides = tuple(width * step for step in found.steps)
    matrix = np.lib.stride_tricks.as_strided(flat[found.offset :], found.shape, strides)
    if found.dtype == "bf16":
        return (matrix.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):  # what is not finite is refused with the prompt
        return np.ascontiguousarray(matrix, np.float32)


def _of_npy(data: bytes) -> _Matrix:
    """Read what numpy.save() writes."""
    size = 2 if data[6:7] == b"\x01" else 4
    begin = 8 + size
    end = begin + int.from_bytes(data[8:begin], "little")
    header = _NPY_HEADER.fullmatch(data[begin:end]) if end - begin <= _MAX_HEADER_BYTES else None
    if header is None:
        raise _wrong("has another header than numpy.save() writes for it")
    order, width, is_fortran = header[1].decode(), header[2].decode(), header[3] == b"True"
    rows, columns = int(header[4]), int(header[5])
    return _Matrix(
        memoryview(data)[end:], f"{order}f{width}", (rows, columns), (1, rows) if is_fortran else (columns, 1)
    )


class _Tensor(msgspec.Struct):
    dtype: str
    shape: tuple[int, int]
    data_offsets: tuple[int, int]


def _of_safetensors(data: bytes) -> _Matrix:
    """Read a file of safetensors that has one tensor."""
    end = 8 + int.from_bytes(data[:8], "little")
    if end > min(len(data), _MAX_HEADER_BYTES):
        raise _wrong("has a header of safetensors that is too long")
    try:
        header = msgspec.json.decode(data[8:end], type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        (found,) = (msgspec.json.decode(one, type=_Tensor) for one in header.values())
        dtype = _SAFETENSORS_TYPES[found.dtype]
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, KeyError, RecursionError):
        raise _wrong("has a header of safetensors for something else") from None
    begin, behind = found.data_offsets
    if not 0 <= begin <= behind <= len(data) - end:
        raise _wrong("has no data where its header says")
    return _Matrix(memoryview(data)[end + begin : end + behind], dtype, found.shape, (found.shape[1], 1))


def _of_torch(data: bytes) -> _Matrix:
    """Read what torch.save() writes for a tensor."""
    if data.count(b"PK\x01\x02") > _MAX_ENTRIES:
        raise _wrong("has more entries than torch.save() writes for it")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            entries = {one.filename.partition("/")[2]: one for one in file.infolist()}
            if any(one.compress_type != zipfile.ZIP_STORED or one.file_size > len(data) for one in entries.values()):
                raise _wrong("is compressed")
            if "byteorder" in entries and file.read(entries["byteorder"]) != b"little":
                raise _wrong("is of another byte order")
            fields = _read_torch_pickle(file.read(entries["data.pkl"])[:_MAX_HEADER_BYTES])
            storage = file.read(entries[f"data/{fields['key']}"])
    except (zipfile.BadZipFile, KeyError, NotImplementedError, RuntimeError, EOFError, OSError, UnicodeDecodeError):
        raise _wrong("is no file of torch.save()") from None
    shape, steps = (fields["rows"], fields["columns"]), (fields["step_of_row"], fields["step_of_column"])
    return _Matrix(memoryview(storage), fields["storage"], shape, steps, fields["offset"])


def _read_torch_pickle(data: bytes) -> dict[str, Any]:
    """Return what varies in torch's instructions for a tensor. They are compared and not run."""
    fields: dict[str, Any] = {}
    try:
        found = [(code.name, value) for code, value, _ in pickletools.genops(data) if code.name not in _NOTES]
    except (ValueError, OverflowError, IndexError):
        raise _wrong("has no pickle of a tensor") from None
    if len(found) != len(_TORCH_PICKLE):
        raise _wrong("has another pickle than torch.save() writes for it")
    for (name, value), wanted in zip(found, _TORCH_PICKLE, strict=True):
        if wanted.islower():
            fields[wanted] = _taken(wanted, name, value)
        elif wanted not in (name, f"{name} {value}"):
            raise _wrong("has another pickle than torch.save() writes for it")
    return fields


def _taken(field: str, name: str, value: Any) -> Any:
    """Return the value of a field of torch's instructions, if it is of the field's type."""
    if field == "storage" and name == "GLOBAL" and str(value).partition(" ")[2] in _TORCH_TYPES:
        return _TORCH_TYPES[value.partition(" ")[2]]
    if field in ("key", "device") and name == "BINUNICODE":
        return value
    if field == "needs_grad" and name in ("NEWTRUE", "NEWFALSE"):
        return None
    if name in _NUMBERS and field not in ("storage", "key", "device", "needs_grad"):
        return value
    raise _wrong("has a tensor of another type")


def _wrong(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"prompt_embeds {what}; it must be {_FORMS}, in a body as base64")
