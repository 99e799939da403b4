"""A bounds-checked reader of safetensors headers: one file, or a folder of them under an index.

Layout (huggingface/safetensors, README): header length u64 little-endian, header JSON, data. The header maps a tensor's
name to {dtype, shape, data_offsets: [begin, end) from the start of the data}. The tensors fill the data without gaps or
overlaps. "__metadata__" is a map of strings.
"""

import json
import math
import mmap
from pathlib import Path

import msgspec

from ipc.errors import ModelFileError, UnsupportedModelError
from ipc.files.mapped_file import map_file

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMENSIONS = 8
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

#: dtype -> bytes of an element.
DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
}


class SafetensorsTensor(msgspec.Struct, frozen=True):
    """The place of a tensor in its file."""

    dtype: str  # a name of DTYPE_BYTES
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int


def read_safetensors(path: Path) -> dict[str, SafetensorsTensor]:
    """Return the tensors of one file, by name.

    Errors: ModelFileError naming the file and what is wrong; UnsupportedModelError for an unknown dtype.
    """
    with map_file(path) as data:
        header, data_begin = _read_header(data, path)
        tensors = {
            name: _read_tensor(name, entry, data_begin, len(data), path)
            for name, entry in header.items()
            if name != "__metadata__"
        }
        _check_layout(tensors, data_begin, len(data), path)
    return tensors


def read_safetensors_metadata(path: Path) -> dict[str, str]:
    """Return the file's own texts by name ("__metadata__"). Errors: those of read_safetensors."""
    with map_file(path) as data:
        header, _ = _read_header(data, path)
    texts = header.get("__metadata__", {})
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ModelFileError(f"{path}: __metadata__ must be an object of texts")
    return texts


def read_safetensors_header_bytes(path: Path) -> bytes:
    """Return the file's first bytes up to its data. Errors: those of read_safetensors."""
    with map_file(path) as data:
        return data[: _header_end(data, path)]


def read_safetensors_folder(folder: Path) -> dict[Path, dict[str, SafetensorsTensor]]:
    """Return the tensors of every weight file of a model folder.

    The weight files are those that its index names, otherwise model.safetensors. Errors: ModelFileError if there are
    none, a file is missing, a tensor is in two files, or the index is wrong.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        return {path: read_safetensors(path) for path in weight_files(folder)}
    weight_map = _read_index(index)
    files = {path: read_safetensors(path) for path in weight_files(folder)}
    found: dict[str, str] = {}
    for path, tensors in files.items():
        for name in tensors:
            if name in found:
                raise ModelFileError(f"{folder}: tensor {name!r:.80} is in both {found[name]} and {path.name}")
            found[name] = path.name
    for name, file_name in weight_map.items():
        if found.get(name) != file_name:
            raise ModelFileError(f"{index}: tensor {name!r:.80} should be in {file_name}, which has no such tensor")
    return files


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a model folder, sorted. Errors: ModelFileError if there are none."""
    index = folder / INDEX_FILE
    if index.is_file():
        return [folder / name for name in sorted(set(_read_index(index).values()))]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    hint = ""
    if any(folder.glob("pytorch_model*.bin")):
        hint = "; pytorch_model.bin is a pickle, which is never loaded: convert it with save_pretrained()"
    raise ModelFileError(f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE}{hint}")


def _read_index(path: Path) -> dict[str, str]:
    """Return tensor name -> name of the file (next to the index) that contains it."""
    with map_file(path) as data:
        if len(data) > MAX_HEADER_BYTES:
            raise ModelFileError(f"{path}: {len(data)} bytes; at most {MAX_HEADER_BYTES} are allowed")
        index = _parse_object(data[:], str(path))
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{path}: expected an object 'weight_map' of tensor names and file names")
    for name, file_name in weight_map.items():
        # A name with a separator could leave the folder.
        if not isinstance(file_name, str) or not file_name.endswith(".safetensors") or set(file_name) & set("/\\\0"):
            raise ModelFileError(f"{path}: tensor {name!r:.80} is in {file_name!r:.80}; expected NAME.safetensors")
    return weight_map


def _header_end(data: mmap.mmap, path: Path) -> int:
    if len(data) < 8:
        raise ModelFileError(f"{path}: {len(data)} bytes; a safetensors file begins with a length of 8 bytes")
    length = int.from_bytes(data[:8], "little")
    limit = min(MAX_HEADER_BYTES, len(data) - 8)
    if not 2 <= length <= limit:
        raise ModelFileError(f"{path}: byte 0: header length {length}; expected 2 to {limit}: truncated or corrupt")
    return 8 + length


def _read_header(data: mmap.mmap, path: Path) -> tuple[dict[str, object], int]:
    """Return (JSON object, bytes before the data)."""
    end = _header_end(data, path)
    if data[8:9] != b"{":
        raise ModelFileError(f"{path}: byte 8: expected '{{', got {data[8:9]!r}: not a safetensors file")
    return _parse_object(data[8:end], f"{path}: header"), end


def _parse_object(text: bytes, source: str) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key occurs twice in one object")
        return found

    try:
        value = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{source}: expected a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{source}: expected a JSON object, got {type(value).__name__}")
    return value


def _read_tensor(name: str, entry: object, data_begin: int, file_bytes: int, path: Path) -> SafetensorsTensor:
    where = f"{path}: tensor {name!r:.80}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ModelFileError(f"{where}: expected an object with dtype, shape and data_offsets, got {entry!r:.80}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise UnsupportedModelError(f"{where}: unknown dtype {dtype!r:.80}; known are {', '.join(DTYPE_BYTES)}")
    if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise ModelFileError(f"{where}: shape must be at most {MAX_DIMENSIONS} integers >= 0, got {shape!r:.80}")
    data_bytes = file_bytes - data_begin
    if not _are_counts(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= data_bytes:
        raise ModelFileError(f"{where}: data_offsets must rise from 0 to at most {data_bytes}, got {offsets!r:.80}")
    begin, end = offsets
    if end - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise ModelFileError(
            f"{where}: {dtype} of shape {shape} takes {math.prod(shape) * DTYPE_BYTES[dtype]} bytes, "
            f"but data_offsets give {end - begin}"
        )
    return SafetensorsTensor(dtype, tuple(shape), data_begin + begin, data_begin + end)


def _are_counts(values: object) -> bool:
    # below 2**48, so that products of MAX_DIMENSIONS such numbers stay cheap and printable
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**48 for value in values)


def _check_layout(tensors: dict[str, SafetensorsTensor], data_begin: int, file_bytes: int, path: Path) -> None:
    position = data_begin
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != position:
            what = "overlaps the one before it" if tensor.begin < position else "leaves a gap before it"
            raise ModelFileError(f"{path}: tensor {name!r:.80} at byte {tensor.begin} {what}, which ends at {position}")
        position = tensor.end
    if position != file_bytes:
        raise ModelFileError(f"{path}: the tensors end at byte {position}, but the file at {file_bytes}")
