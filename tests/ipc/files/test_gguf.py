"""The GGUF header reader, against the gguf package and against damaged files."""

import os
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.errors import ModelFileError, UnsupportedModelError
from ipc.files import gguf as own_gguf
from ipc.files.gguf import (
    TENSOR_TYPES,
    cut_gguf_metadata,
    forget_gguf,
    parse_gguf_metadata,
    read_gguf,
    read_gguf_tensors,
)
from ipc.files.gguf_strings import GgufStrings
from ipc.files.model_files import resolve_model

VALUES: dict[str, tuple[Any, gguf.GGUFValueType]] = {
    "t.u8": (200, gguf.GGUFValueType.UINT8),
    "t.i8": (-100, gguf.GGUFValueType.INT8),
    "t.u16": (60_000, gguf.GGUFValueType.UINT16),
    "t.i16": (-30_000, gguf.GGUFValueType.INT16),
    "t.u32": (4_000_000_000, gguf.GGUFValueType.UINT32),
    "t.i32": (-2_000_000_000, gguf.GGUFValueType.INT32),
    "t.f32": (0.15625, gguf.GGUFValueType.FLOAT32),
    "t.bool": (True, gguf.GGUFValueType.BOOL),
    "t.string": ("größer 🙂", gguf.GGUFValueType.STRING),
    "t.u64": (2**63 + 1, gguf.GGUFValueType.UINT64),
    "t.i64": (-(2**62), gguf.GGUFValueType.INT64),
    "t.f64": (1e-300, gguf.GGUFValueType.FLOAT64),
}
ARRAYS: dict[str, list[Any]] = {
    "t.strings": ["a", "", "ünïcode", "🙂"],
    "t.ints": [1, -2, 3],
    "t.floats": [0.5, -1.25],
    "t.bools": [True, False, True],
}


def write_sample(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, (value, kind) in VALUES.items():
        writer.add_key_value(key, value, kind)
    for key, array in ARRAYS.items():
        writer.add_array(key, array)
    writer.add_tensor("vector", np.arange(5, dtype=np.float32))
    writer.add_tensor("matrix", np.arange(12, dtype=np.float16).reshape(3, 4))
    blocks = np.arange(2 * 34, dtype=np.uint8).reshape(1, 2 * 34)
    writer.add_tensor("quantized", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample(tmp_path_factory.mktemp("gguf") / "sample.gguf")


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def tensor_info(name: str, offset: int, dims: tuple[int, ...] = (8,), kind: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def build(keys: list[bytes], tensors: list[bytes], data: bytes = b"", version: int = 3) -> bytes:
    """A file by hand: each key is a whole `key, type, value`."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def read_bytes(tmp_path: Path, data: bytes) -> Any:
    path = tmp_path / "made.gguf"
    path.write_bytes(data)
    return read_gguf(path)


def test_every_value_type_and_tensor_as_the_gguf_package_reads_them(sample: Path) -> None:
    header = read_gguf(sample)
    oracle = gguf.GGUFReader(sample)
    expected = {key: field.contents() for key, field in oracle.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == expected
    assert {key: header.metadata[key] for key in VALUES} == {key: value for key, (value, _) in VALUES.items()}
    assert header.metadata["t.bools"] == [True, False, True]
    assert type(header.metadata["t.bool"]) is bool
    assert [
        (tensor.name, tensor.shape, tensor.type, tensor.offset, tensor.num_bytes) for tensor in header.tensors.values()
    ] == [
        (
            tensor.name,
            tuple(int(n) for n in tensor.shape)[::-1],
            tensor.tensor_type.name,
            tensor.data_offset,
            tensor.n_bytes,
        )
        for tensor in oracle.tensors
    ]
    forget_gguf()
    assert read_gguf_tensors(sample) == header.tensors
    assert header.data_offset == oracle.data_offset
    assert header.file_bytes == sample.stat().st_size


def test_tensor_types_are_those_of_the_gguf_package() -> None:
    known = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {kind: known[kind] for kind in TENSOR_TYPES} == TENSOR_TYPES


def test_demo_file_is_read_fast() -> None:
    path = resolve_model(None)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        header = read_gguf(path)
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.3
    assert len(header.tensors) == 272
    assert header.metadata["llama.block_count"] == 30
    tokens = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, GgufStrings)
    assert (len(tokens), tokens[1], tokens[2]) == (49152, "<|im_start|>", "<|im_end|>")
    embedding = header.tensors["token_embd.weight"]
    assert (embedding.shape, embedding.type, embedding.offset) == ((49152, 576), "Q8_0", 1785664)


def test_a_vocabulary_that_is_not_decoded_has_the_same_strings() -> None:
    lazy, decoded = read_gguf(resolve_model(None)).metadata, parse_gguf_metadata(cut_gguf_metadata(resolve_model(None)))
    assert lazy.keys() == decoded.keys()
    for key, value in decoded.items():
        found = lazy[key]
        assert (list(found) if isinstance(found, GgufStrings) else found) == value, key
    assert isinstance(lazy["tokenizer.ggml.merges"], GgufStrings)


def test_version_2_is_read_and_others_are_refused(sample: Path, tmp_path: Path) -> None:
    data = sample.read_bytes()
    version_2 = read_bytes(tmp_path, data[:4] + struct.pack("<I", 2) + data[8:])
    assert version_2.version == 2
    assert version_2.metadata == read_gguf(sample).metadata
    for version, name in ((1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")):
        with pytest.raises(UnsupportedModelError, match=f"{name}.*supported are 2 and 3"):
            read_bytes(tmp_path, data[:4] + struct.pack("<I", version) + data[8:])


def test_cut_metadata_is_a_file_without_tensors(sample: Path, tmp_path: Path) -> None:
    cut = cut_gguf_metadata(sample)
    header = read_gguf(sample)
    assert len(cut) == header.metadata_bytes
    assert parse_gguf_metadata(cut) == header.metadata
    alone = read_bytes(tmp_path, cut)
    assert (alone.metadata, alone.tensors) == (header.metadata, {})


def test_cut_metadata_decodes_no_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, read = list[int](), own_gguf._read_strings

    def counted(cursor: Any, count: int, key: str) -> Any:
        counts.append(count)
        return read(cursor, count, key)

    monkeypatch.setattr(own_gguf, "_read_strings", counted)
    forget_gguf()
    cut_gguf_metadata(resolve_model(None))
    assert max(counts, default=0) < 1024


def test_truncation_at_every_byte(sample: Path, tmp_path: Path) -> None:
    data = sample.read_bytes()
    last = max(tensor.offset + tensor.num_bytes for tensor in read_gguf(sample).tensors.values())
    path = tmp_path / "short.gguf"
    path.write_bytes(data)
    for size in reversed(range(last)):
        os.truncate(path, size)
        with pytest.raises(ModelFileError, match=r"short\.gguf"):
            read_gguf(path)
        if size % 5 == 0:
            with pytest.raises(ModelFileError, match=r"short\.gguf"):
                read_gguf_tensors(path)
    metadata = cut_gguf_metadata(sample)
    for size in range(len(metadata)):
        with pytest.raises(ModelFileError, match="byte"):
            parse_gguf_metadata(metadata[:size])


def test_truncation_of_the_demo_file() -> None:
    metadata = cut_gguf_metadata(resolve_model(None))
    for size in [*range(4096), *range(4096, len(metadata), 99_991), len(metadata) - 1]:
        with pytest.raises(ModelFileError, match=r"byte \d+: .* are left"):
            parse_gguf_metadata(metadata[:size])


@pytest.mark.parametrize("lie", [2**64 - 1, 2**63, 2**40, 2**31, 2**22, 4097])
def test_a_lying_number_at_every_byte_allocates_nothing(sample: Path, lie: int) -> None:
    metadata = cut_gguf_metadata(sample)
    refused = 0
    tracemalloc.start()
    try:
        for position in range(len(metadata) - 8):
            try:
                parse_gguf_metadata(metadata[:position] + struct.pack("<Q", lie) + metadata[position + 8 :])
            except ModelFileError:
                refused += 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refused > len(metadata) // 2
    assert peak < 1 << 20


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(edits=st.lists(st.tuples(st.integers(0, 4000), st.binary(min_size=1, max_size=12)), min_size=1, max_size=4))
def test_damage_raises_nothing_but_model_file_errors(sample: Path, edits: list[tuple[int, bytes]]) -> None:
    data = bytearray(sample.read_bytes())
    for position, piece in edits:
        position %= len(data)
        data[position : position + len(piece)] = piece
    path = sample.with_name("damaged.gguf")
    path.write_bytes(data)
    try:
        header = read_gguf(path)
    except ModelFileError as error:
        assert "damaged.gguf" in str(error)  # noqa: PT017 - soundness is as good an outcome
    else:
        assert all(tensor.offset + tensor.num_bytes <= len(data) for tensor in header.tensors.values())


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(data=st.binary(max_size=300))
def test_arbitrary_bytes(data: bytes) -> None:
    with pytest.raises(ModelFileError):
        parse_gguf_metadata(b"GGUF\3\0\0\0" + bytes(8) + b"\5" + bytes(7) + data[:60])
    with pytest.raises(ModelFileError):
        parse_gguf_metadata(data)


KEY, SHORT = string("k"), struct.pack("<Q", 1)
LIES: dict[str, tuple[bytes, str]] = {
    "magic": (b"GGML" + bytes(60), "byte 0: expected the magic number"),
    "value type": (build([KEY + struct.pack("<I", 13)], []) + bytes(64), "'k' has value type 13; known are 0 to 12"),
    "array of arrays": (build([KEY + struct.pack("<IIQ", 9, 9, 1)], []) + bytes(64), "no arrays of arrays"),
    "array length": (build([KEY + struct.pack("<IIQ", 9, 0, 2**23)], []), "8388608 elements; at most"),
    "string": (build([KEY + struct.pack("<IQ", 8, 2) + b"\xff\xff"], []), "value of 'k' is not UTF-8"),
    "late element": (
        build([KEY + struct.pack("<IIQ", 9, 8, 1100) + (SHORT + b"a") * 1099 + SHORT + b"\xff"], []),
        "string 1099 of 'k' is not UTF-8",
    ),
    "element": (build([KEY + struct.pack("<IIQQ", 9, 8, 1, 1) + b"\xff"], []), "string 0 of 'k' is not UTF-8"),
    "bool": (build([KEY + struct.pack("<IB", 7, 2)], []), "neither 0 nor 1"),
    "duplicate key": (build([KEY + struct.pack("<IB", 0, 2)] * 2, []), "key 1 is a duplicate: 'k'"),
    "empty key": (build([string("") + struct.pack("<II", 4, 2)], []), "key 0 is empty"),
    "alignment": (build([string("general.alignment") + struct.pack("<II", 4, 33)], []), "power of two.* got 33"),
    "no dimension": (build([], [tensor_info("t", 0, ())], bytes(64)), "'t' has 0 dimensions"),
    "dimensions": (build([], [tensor_info("t", 0, (1,) * 5)], bytes(64)), "'t' has 5 dimensions"),
    "zero": (build([], [tensor_info("t", 0, (8, 0))], bytes(64)), r"shape \(0, 8\) cannot be"),
    "rows": (build([], [tensor_info("t", 0, (33,), 8)], bytes(64)), "cannot be rows of Q8_0 blocks"),
    "misaligned": (build([], [tensor_info("t", 4)], bytes(64)), "begins at 4, which is not a multiple of the alignm"),
    "past the end": (build([], [tensor_info("t", 64)], bytes(64)), r"needs bytes 128 to 160, but the file ends at 128"),
    "huge": (build([], [tensor_info("t", 0, (2**63, 2**63))], bytes(64)), "but the file ends at"),
    "far": (build([], [tensor_info("t", 2**64 - 32)], bytes(64)), "but the file ends at"),
    "same name": (build([], [tensor_info("t", 0), tensor_info("t", 32)], bytes(64)), "two tensors are named 't'"),
    "overlap": (build([], [tensor_info("b", 32), tensor_info("a", 0, (9,))], bytes(96)), "'a' and 'b' overlap at byte"),
    "tensor count": (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0) + bytes(64), f"{2**60} tensors need"),
    "key count": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60) + bytes(64), f"{2**60} metadata keys need"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_named(lie: str, tmp_path: Path) -> None:
    data, message = LIES[lie]
    with pytest.raises(ModelFileError, match=message) as caught:
        read_bytes(tmp_path, data)
    assert str(tmp_path / "made.gguf") in str(caught.value)


def test_sound_files_of_the_same_hand_are_read(tmp_path: Path) -> None:
    tensors = [tensor_info("b", 32), tensor_info("a", 0)]
    header = read_bytes(tmp_path, build([KEY + struct.pack("<IB", 7, 1)], tensors, bytes(64)))
    assert header.metadata == {"k": True}
    assert [tensor.offset - header.data_offset for tensor in header.tensors.values()] == [32, 0]


def test_unknown_tensor_type_is_unsupported(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="tensor 't' has unknown type 4"):
        read_bytes(tmp_path, build([], [tensor_info("t", 0, (8,), 4)], bytes(64)))


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "empty.gguf").touch()
    for name, message in (
        ("none.gguf", "cannot be read: .*No such file"),
        ("empty.gguf", "the file is empty"),
        ("pipe.gguf", "expected a regular file"),
        (".", "expected a regular file"),
        ("nul\0.gguf", "cannot be read: .*embedded null"),
    ):
        with pytest.raises(ModelFileError, match=message):
            read_gguf(tmp_path / name)
