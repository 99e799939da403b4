"""A bounds-checked reader of GGUF headers, versions 2 and 3, little-endian.

Layout (gguf.md of ggml's docs): "GGUF", version u32, tensor count u64, key count u64; then the metadata
`key, value type u32, value`; then per tensor `name, number of dimensions u32, dimensions u64 (innermost first),
type u32, offset u64 from the data section`; then padding to general.alignment; then the data section.
A string is a length u64 and UTF-8 bytes; an array is an element type u32, a count u64 and the elements.

Every count is compared with the remaining bytes before anything is read or allocated for it.
"""

import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeAlias

import msgspec

from ipc.errors import ModelFileError, UnsupportedModelError
from ipc.files.gguf_strings import CutStringError, GgufStrings, find_strings, first_not_utf8
from ipc.files.mapped_file import map_file
from ipc.tables.rounding import round_up

GgufScalar: TypeAlias = bool | int | float | str
GgufValue: TypeAlias = GgufScalar | list[GgufScalar] | GgufStrings

#: Metadata and tensor infos together, bytes. Vocabularies of 256k tokens take about 15 MB.
MAX_HEADER_BYTES = 64 << 20
MAX_ARRAY_LENGTH = 1 << 22
_MANY = 1024  # strings; read_gguf() does not decode an array of more
MAX_DIMENSIONS = 4  # ggml's GGML_MAX_DIMS
_DEFAULT_ALIGNMENT = 32  # bytes
_MAX_ALIGNMENT = 1 << 16

#: ggml type id -> name, elements in a block, bytes of a block.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}

#: Metadata value type -> struct code. 7 is bool, 8 string, 9 array.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_MIN_KEY_BYTES = 8 + 1 + 4 + 1  # key length, key, value type, value
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # name length, name, dimensions, one of them, type, offset


class GgufTensor(msgspec.Struct, frozen=True):
    """The place of a tensor in its file."""

    name: str
    shape: tuple[int, ...]  # outermost first, as in NumPy; the file has the reverse order
    type: str  # a name of TENSOR_TYPES
    offset: int  # bytes from the start of the file
    num_bytes: int


class GgufHeader(msgspec.Struct, frozen=True):
    """All of a GGUF file except its tensors' data."""

    version: int
    metadata: dict[str, GgufValue]
    tensors: dict[str, GgufTensor]
    metadata_bytes: int  # the file's first bytes, up to the end of the metadata
    data_offset: int  # bytes; start of the data section
    file_bytes: int


def read_gguf(path: Path) -> GgufHeader:
    """Return the header of a GGUF file. Every tensor is inside the file, and none overlap.

    The strings of a vocabulary are decoded when they are asked for (GgufStrings). The headers of the last two files,
    which may be a model and its projector, are kept until a file changes or forget_gguf(). Errors: ModelFileError
    naming the file, the byte offset and what was expected; UnsupportedModelError for a valid file of another version,
    byte order or tensor type.
    """
    state = _state_of(path)
    if (path, state) not in _kept:
        header = _read_header(path)
        while len(_kept) > 1:
            del _kept[next(iter(_kept))]
        _kept[path, state] = header
    return _kept[path, state]


def gguf_tokens(metadata: Mapping[str, GgufValue]) -> Sequence[GgufScalar] | None:
    """Return the tokens of a vocabulary; None if the metadata has no list of them."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    return tokens if isinstance(tokens, list | GgufStrings) else None


def read_gguf_tensors(path: Path) -> dict[str, GgufTensor]:
    """Return the tensors of read_gguf(), without keeping the header. Errors: the same."""
    kept = _kept.get((path, _state_of(path)))
    return (_read_header(path) if kept is None else kept).tensors


def forget_gguf() -> None:
    """Free the memory of the headers that read_gguf() keeps."""
    _kept.clear()


#: The last files' headers, by path and state.
_kept: dict[tuple[Path, tuple[int, ...]], GgufHeader] = {}


def _state_of(path: Path) -> tuple[int, ...]:
    """Return values of the file's status that change if its content does. Errors: ModelFileError."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: cannot be read: {error}") from None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _read_header(path: Path) -> GgufHeader:
    with map_file(path) as data:
        cursor = _Cursor(data, str(path), decodes_all=False)
        version, num_tensors, metadata = _read_metadata(cursor)
        metadata_bytes = cursor.position
        alignment = _alignment(cursor, metadata)
        cursor.check_count(num_tensors, _MIN_TENSOR_BYTES, "tensors")
        relative = [_read_tensor(cursor, alignment) for _ in range(num_tensors)]
        data_offset = round_up(cursor.position, alignment)
        tensors = _place_tensors(relative, data_offset, len(data), str(path))
        return GgufHeader(version, metadata, tensors, metadata_bytes, data_offset, len(data))


def parse_gguf_metadata(data: bytes, source: str = "GGUF metadata") -> dict[str, GgufValue]:
    """Return the metadata at the start of `data`; the bytes after it are not read. Errors: those of read_gguf."""
    return _read_metadata(_Cursor(data, source))[2]


def cut_gguf_metadata(path: Path) -> bytes:
    """Return a file's first bytes up to the end of its metadata, as a GGUF file of its own with a tensor count of 0.

    A header that read_gguf() keeps is not read again. Errors: those of read_gguf, except for tensors.
    """
    kept = _kept.get((path, _state_of(path)))
    with map_file(path) as data:
        cursor = _Cursor(data, str(path), decodes_all=False)
        if kept is None:
            _read_metadata(cursor)
        return data[:8] + bytes(8) + data[16 : cursor.position if kept is None else kept.metadata_bytes]


class _Cursor:
    """A position in the header. Nothing is read past `end`. decodes_all: False = long arrays become GgufStrings."""

    def __init__(self, data: bytes | mmap.mmap, source: str, *, decodes_all: bool = True) -> None:
        self.data = data
        self.source = source
        self.decodes_all = decodes_all
        self.position = 0
        self.end = min(len(data), MAX_HEADER_BYTES)

    def fail(self, what: str) -> NoReturn:
        raise ModelFileError(f"{self.source}: byte {self.position}: {what}")

    def check_count(self, count: int, size: int, what: str) -> None:
        """Fail unless `count` items of at least `size` bytes can follow."""
        left = self.end - self.position
        if count * size > left:
            limit = f" of the {MAX_HEADER_BYTES} a header may have" if self.end < len(self.data) else ""
            self.fail(f"{count} {what} need {count * size} bytes, but only {left}{limit} are left")

    def read(self, number: struct.Struct, what: str) -> int:
        self.check_count(1, number.size, what)
        (value,) = number.unpack_from(self.data, self.position)
        self.position += number.size
        assert isinstance(value, int), value
        return value

    def read_string(self, what: str) -> str:
        length = self.read(_U64, f"length of {what}")
        self.check_count(length, 1, f"bytes of {what}")
        raw = self.data[self.position : self.position + length]
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8: {error.reason} at its byte {error.start}")
        self.position += length
        return text


def _read_metadata(cursor: _Cursor) -> tuple[int, int, dict[str, GgufValue]]:
    """Return (version, tensor count, metadata)."""
    cursor.check_count(1, 4, "magic number")
    if (magic := cursor.data[:4]) != b"GGUF":
        cursor.fail(f"expected the magic number b'GGUF', got {magic!r}")
    cursor.position = 4
    version = cursor.read(_U32, "version")
    if version not in (2, 3):
        order = " (big-endian)" if version >= 1 << 24 else ""
        raise UnsupportedModelError(f"{cursor.source}: byte 4: GGUF version {version}{order}; supported are 2 and 3")
    num_tensors = cursor.read(_U64, "tensor count")
    num_keys = cursor.read(_U64, "key count")
    cursor.check_count(num_keys, _MIN_KEY_BYTES, "metadata keys")
    metadata: dict[str, GgufValue] = {}
    for index in range(num_keys):
        key = cursor.read_string(f"metadata key {index}")
        if not key or key in metadata:
            cursor.fail(f"metadata key {index} is {'a duplicate' if key else 'empty'}: {key!r:.80}")
        kind = cursor.read(_U32, f"value type of {key!r:.80}")
        metadata[key] = _read_value(cursor, kind, key)
    return version, num_tensors, metadata


def _read_value(cursor: _Cursor, kind: int, key: str) -> GgufValue:
    if kind == _STRING:
        return cursor.read_string(f"value of {key!r:.80}")
    if kind != _ARRAY:
        return _read_numbers(cursor, kind, 1, key)[0]
    kind = cursor.read(_U32, f"element type of {key!r:.80}")
    count = cursor.read(_U64, f"length of {key!r:.80}")
    if count > MAX_ARRAY_LENGTH:
        cursor.fail(f"array {key!r:.80} has {count} elements; at most {MAX_ARRAY_LENGTH} are allowed")
    if kind == _STRING:
        return (_read_strings if cursor.decodes_all or count <= _MANY else _find_strings)(cursor, count, key)
    return _read_numbers(cursor, kind, count, key)


def _read_numbers(cursor: _Cursor, kind: int, count: int, key: str) -> list[GgufScalar]:
    code = "B" if kind == _BOOL else _NUMBERS.get(kind)
    if code is None:
        cursor.fail(f"{key!r:.80} has value type {kind}; known are 0 to 12, and no arrays of arrays")
    layout = struct.Struct(f"<{count}{code}")
    cursor.check_count(1, layout.size, f"value of {key!r:.80}")
    values: list[GgufScalar] = list(layout.unpack_from(cursor.data, cursor.position))
    if kind == _BOOL:
        if any(value not in (0, 1) for value in values):
            cursor.fail(f"{key!r:.80} has a truth value that is neither 0 nor 1")
        values = [value == 1 for value in values]
    cursor.position += layout.size
    return values


def _read_strings(cursor: _Cursor, count: int, key: str) -> list[GgufScalar]:
    """Read strings in a loop without calls, because vocabularies make up nearly all of a header."""
    cursor.check_count(count, 8, f"strings of {key!r:.80}")
    data, end, position = cursor.data, cursor.end, cursor.position
    unpack = _U64.unpack_from
    strings: list[GgufScalar] = []
    try:
        for _ in range(count):
            stop = position + 8 + unpack(data, position)[0]
            if stop > end:
                break
            strings.append(data[position + 8 : stop].decode())
            position = stop
    except (UnicodeDecodeError, struct.error):
        pass
    cursor.position = position
    if len(strings) < count:
        cursor.read_string(f"string {len(strings)} of {key!r:.80}")
        raise AssertionError(f"string {len(strings)} of {count} at byte {position} is valid after all")
    return strings


def _find_strings(cursor: _Cursor, count: int, key: str) -> GgufStrings:
    """Go past strings and return where they are, once they are known to be UTF-8."""
    cursor.check_count(count, 8, f"strings of {key!r:.80}")
    begin = cursor.position
    try:
        starts, cursor.position = find_strings(cursor.data, begin, count, cursor.end)
    except CutStringError as error:
        cursor.position = error.position
        cursor.read_string(f"string {error.index} of {key!r:.80}")
        raise AssertionError(f"{error} of {count} is whole after all") from None
    data, starts = cursor.data[begin : cursor.position], starts - begin
    if (index := first_not_utf8(data, starts)) is not None:
        cursor.position = begin + int(starts[index])
        cursor.read_string(f"string {index} of {key!r:.80}")
        raise AssertionError(f"string {index} of {count} is UTF-8 after all")
    return GgufStrings(data, starts)


def _alignment(cursor: _Cursor, metadata: dict[str, GgufValue]) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(value) is not int or not 8 <= value <= _MAX_ALIGNMENT or value & (value - 1):
        cursor.fail(f"general.alignment must be a power of two from 8 to {_MAX_ALIGNMENT}, got {value!r:.80}")
    return value


def _read_tensor(cursor: _Cursor, alignment: int) -> GgufTensor:
    """Read one tensor info. Its offset is still relative to the data section."""
    name = cursor.read_string("tensor name")
    num_dimensions = cursor.read(_U32, f"number of dimensions of {name!r:.80}")
    if not name or not 1 <= num_dimensions <= MAX_DIMENSIONS:
        cursor.fail(f"tensor {name!r:.80} has {num_dimensions} dimensions; expected a name and 1 to {MAX_DIMENSIONS}")
    shape = tuple(cursor.read(_U64, f"dimension of {name!r:.80}") for _ in range(num_dimensions))[::-1]
    kind = cursor.read(_U32, f"type of {name!r:.80}")
    offset = cursor.read(_U64, f"offset of {name!r:.80}")
    if kind not in TENSOR_TYPES:
        raise UnsupportedModelError(
            f"{cursor.source}: byte {cursor.position - 12}: tensor {name!r:.80} has unknown type {kind}"
        )
    type_name, block_elements, block_bytes = TENSOR_TYPES[kind]
    if min(shape) < 1 or shape[-1] % block_elements:
        cursor.fail(f"tensor {name!r:.80} of shape {shape} cannot be rows of {type_name} blocks ({block_elements})")
    if offset % alignment:
        cursor.fail(f"tensor {name!r:.80} begins at {offset}, which is not a multiple of the alignment {alignment}")
    return GgufTensor(name, shape, type_name, offset, math.prod(shape) // block_elements * block_bytes)


def _place_tensors(tensors: list[GgufTensor], data_offset: int, file_bytes: int, source: str) -> dict[str, GgufTensor]:
    """Return the tensors by name, in the file's order, with absolute offsets."""
    placed: dict[str, GgufTensor] = {}
    for tensor in tensors:
        if tensor.name in placed:
            raise ModelFileError(f"{source}: two tensors are named {tensor.name!r:.80}")
        offset = data_offset + tensor.offset
        if offset + tensor.num_bytes > file_bytes:
            raise ModelFileError(
                f"{source}: tensor {tensor.name!r:.80} needs bytes {offset} to {offset + tensor.num_bytes}, "
                f"but the file ends at {file_bytes}: truncated or corrupt"
            )
        placed[tensor.name] = GgufTensor(tensor.name, tensor.shape, tensor.type, offset, tensor.num_bytes)
    end, before = data_offset, ""
    for tensor in sorted(placed.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise ModelFileError(
                f"{source}: tensors {before!r:.80} and {tensor.name!r:.80} overlap at byte {tensor.offset}"
            )
        end, before = tensor.offset + tensor.num_bytes, tensor.name
    return placed
