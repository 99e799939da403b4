"""The safetensors header reader, against the safetensors package and against damaged files."""

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ipc.errors import ModelFileError, UnsupportedModelError
from ipc.files.safetensors import read_safetensors, read_safetensors_folder, read_safetensors_header_bytes, weight_files

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.arange(4, dtype=torch.bfloat16),
    "c.half": torch.ones(2, 1, 2, dtype=torch.float16),
    "ids": torch.tensor([1, 2], dtype=torch.int64),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
}


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("safetensors") / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    return path


def build(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(begin: int, end: int, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_headers_as_the_safetensors_package_reads_them(sample: Path) -> None:
    found = read_safetensors(sample)
    data = sample.read_bytes()
    assert found.keys() == TENSORS.keys()
    with safetensors.safe_open(sample, framework="pt") as oracle:
        for name, tensor in found.items():
            piece = oracle.get_slice(name)
            assert (list(tensor.shape), tensor.dtype) == (piece.get_shape(), piece.get_dtype())
            expected = oracle.get_tensor(name)
            raw = bytes(expected.reshape(-1).view(torch.uint8).tolist()) if expected.numel() else b""
            assert data[tensor.begin : tensor.end] == raw
    header = read_safetensors_header_bytes(sample)
    assert len(header) == min(tensor.begin for tensor in found.values())
    assert data.startswith(header)


def test_truncation_at_every_byte(sample: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.safetensors"
    path.write_bytes(sample.read_bytes())
    for size in reversed(range(path.stat().st_size)):
        os.truncate(path, size)
        with pytest.raises(ModelFileError, match=r"short\.safetensors"):
            read_safetensors(path)


LIES: dict[str, tuple[bytes, str]] = {
    "short": (b"\2", "1 bytes; a safetensors file begins with a length of 8 bytes"),
    "length": ((2**63).to_bytes(8, "little") + b"{}", "header length 9223372036854775808; expected 2 to 2"),
    "pickle": (build(b"PK\3\4  "), "byte 8: expected '{'"),
    "json": (build(b"{]"), "header: expected a JSON object"),
    "deep": (build(b'{"a":' * 100_000), "header: expected a JSON object"),
    "utf-8": (build(b'{"\xff":1}'), "header: expected a JSON object"),
    "duplicate": (build(b'{"a":1,"a":1}'), "a key occurs twice"),
    "entry": (build({"a": 1}), "expected an object with dtype, shape and data_offsets"),
    "keys": (build({"a": {"dtype": "F32", "shape": []}}), "expected an object with dtype, shape and data_offsets"),
    "negative": (build({"a": entry(0, 8, [-2])}, bytes(8)), "shape must be"),
    "float": (build({"a": entry(0, 8, [2.0])}, bytes(8)), "shape must be"),
    "bool": (build({"a": entry(0, 4, [True])}, bytes(4)), "shape must be"),
    "dimensions": (build({"a": entry(0, 4, [1] * 9)}, bytes(4)), "shape must be at most 8"),
    "huge": (build({"a": entry(0, 8, [2**47] * 8)}, bytes(8)), "takes .* bytes, but data_offsets give 8"),
    "size": (build({"a": entry(0, 12)}, bytes(12)), r"F32 of shape \[2\] takes 8 bytes, but data_offsets give 12"),
    "backwards": (build({"a": entry(8, 0)}, bytes(8)), "data_offsets must rise from 0 to at most 8"),
    "past the end": (build({"a": entry(0, 16, [4])}, bytes(8)), "data_offsets must rise from 0 to at most 8"),
    "overlap": (build({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)), "'b' .* overlaps the one before it"),
    "hole": (build({"a": entry(0, 8), "b": entry(12, 20)}, bytes(20)), "'b' .* leaves a gap before it"),
    "rest": (build({"a": entry(0, 8)}, bytes(12)), "the tensors end at byte .*, but the file at"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_named(lie: str, tmp_path: Path) -> None:
    data, message = LIES[lie]
    path = tmp_path / "made.safetensors"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=message) as caught:
        read_safetensors(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("dtype", ["F4", 7, None, ["F32"]])
def test_unknown_dtypes_are_unsupported(dtype: Any, tmp_path: Path) -> None:
    path = tmp_path / "made.safetensors"
    path.write_bytes(build({"a": entry(0, 8, dtype=dtype)}, bytes(8)))
    with pytest.raises(UnsupportedModelError, match=r"tensor 'a': unknown dtype .*; known are BOOL"):
        read_safetensors(path)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(edits=st.lists(st.tuples(st.integers(0, 2000), st.binary(min_size=1, max_size=9)), min_size=1, max_size=3))
def test_damage_raises_nothing_but_model_file_errors(sample: Path, edits: list[tuple[int, bytes]]) -> None:
    data = bytearray(sample.read_bytes())
    for position, piece in edits:
        position %= len(data)
        data[position : position + len(piece)] = piece
    path = sample.with_name("damaged.safetensors")
    path.write_bytes(data)
    try:
        found = read_safetensors(path)
    except ModelFileError as error:
        assert "damaged.safetensors" in str(error)  # noqa: PT017 - soundness is as good an outcome
    else:
        assert all(tensor.end <= len(data) for tensor in found.values())


def test_a_lying_length_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.write((300 << 20).to_bytes(8, "little") + b"{}")
        file.truncate(400 << 20)  # a sparse file: the length is within it, but above the cap
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match="header length 314572800; expected 2 to 100000000"):
            read_safetensors(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# --- folders ------------------------------------------------------------------------------------------------------


def write_shards(folder: Path, weight_map: Any = None) -> None:
    save_file({"a": torch.ones(2)}, folder / "model-1.safetensors")
    save_file({"b": torch.ones(3)}, folder / "model-2.safetensors")
    whole = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index = {"metadata": {"total_size": 20}, "weight_map": whole if weight_map is None else weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_folder_with_one_file(sample: Path) -> None:
    assert read_safetensors_folder(sample.parent) == {sample: read_safetensors(sample)}


def test_folder_with_an_index(tmp_path: Path) -> None:
    write_shards(tmp_path)
    files = [tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors"]
    assert weight_files(tmp_path) == files
    found = read_safetensors_folder(tmp_path)
    assert {path: list(tensors) for path, tensors in found.items()} == {files[0]: ["a"], files[1]: ["b"]}


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "model-1.safetensors", "c": "model-2.safetensors"}, "'c' should be in model-2.safetensors"),
        ({"a": "model-2.safetensors"}, "'a' should be in model-2.safetensors"),
        ({"a": "model-3.safetensors"}, "model-3.safetensors: cannot be read: .*No such file"),
        ({"a": "../model-1.safetensors"}, "expected NAME.safetensors"),
        ({"a": "weights.bin"}, "expected NAME.safetensors"),
        ({"a": 1}, "expected NAME.safetensors"),
        ({}, "expected an object 'weight_map'"),
        ([], "expected an object 'weight_map'"),
    ],
)
def test_a_wrong_index_is_named(weight_map: Any, message: str, tmp_path: Path) -> None:
    write_shards(tmp_path, weight_map)
    with pytest.raises(ModelFileError, match=message):
        read_safetensors_folder(tmp_path)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "model-2.safetensors")
    with pytest.raises(ModelFileError, match=r"'a' is in both model-1\.safetensors and model-2\.safetensors"):
        read_safetensors_folder(tmp_path)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"expected model\.safetensors or model\.safetensors\.index\.json$"):
        weight_files(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelFileError, match="is a pickle, which is never loaded"):
        weight_files(tmp_path)
