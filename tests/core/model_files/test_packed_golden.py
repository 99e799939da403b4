"""Packed matrices that other libraries wrote: the numbers that these libraries dequantize them to, bit for bit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from core.model_files.model_config import read_model_config
from core.model_files.tensors.packed_codes import read_codes
from core.model_files.tensors.weights import load_weights
from core.models.config import Packing
from core.models.operations.stored_matrix import StoredMatrix
from ipc.errors import ModelFileError, UnsupportedModelError
from kernels.elements import BFLOAT16, FLOAT32, rounded
from tests.core.model_files.make_packed_golden import GOLDEN, SHAPE, Tensors, make
from tools.lab.bench.tiny_model import write_tiny_model

STEM = "model.layers.0.self_attn.q_proj"
NF4 = "weight.quant_state.bitsandbytes__nf4"


def golden() -> dict[str, Tensors]:
    cases: dict[str, Tensors] = {}
    for name, tensor in load_file(GOLDEN).items():
        case, _, kind = name.partition("/")
        cases.setdefault(case, {})[kind] = tensor
    return cases


CASES = golden()
WHOLE = [case for case in CASES if not case.endswith("-odd")]
#: Case -> the type of blocks that it stays packed as; the others become dense.
KEPT = {
    "compressed-tensors-mxfp4": "MXFP4",
    "torchao-intx": "Q4_0",
    "torchao-int8": "Q8_0",
    "torchao-float8": "FP8",
    "compressed-tensors-nvfp4": "NVFP4_F32",
    **dict.fromkeys(("bitsandbytes-nf4", "bitsandbytes-nf4-nested", "bitsandbytes-nf4-in-bfloat16"), "NF4"),
    "bitsandbytes-fp4-128": "BNB_FP4",
}
#: compressed-tensors names a format; the other configs say nothing that matters.
FORMATS = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized", "mxfp8": "mxfp8-quantized"}


def packing_of(case: str) -> Packing:
    return next(name for name in ("compressed-tensors", "bitsandbytes", "torchao") if case.startswith(name))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return folder


def folder_with(
    source: Path, folder: Path, case: str, edit: dict[str, Any] | None = None, metadata: dict[str, str] | None = None
) -> Path:
    """The tiny model with this matrix in place of one of its own."""
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    del tensors[f"{STEM}.weight"]
    own = {kind: tensor for kind, tensor in CASES[case].items() if kind != "expected"} | (edit or {})
    tensors |= {f"{STEM}.{kind}": tensor for kind, tensor in own.items() if tensor is not None}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": packing_of(case)}
    if (name := case.removeprefix("compressed-tensors-")) in FORMATS:
        config["quantization_config"]["format"] = FORMATS[name]
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata)
    return folder


def read(folder: Path, dtype: Any = FLOAT32) -> StoredMatrix:
    """The matrix, from the folder."""
    weights = dict(load_weights(folder, read_model_config(folder), dtype))
    matrix = weights[f"{STEM}.weight"]
    assert isinstance(matrix, StoredMatrix)
    return matrix


@pytest.mark.parametrize("case", WHOLE)
def test_numbers_are_those_of_the_library(case: str, source: Path, tmp_path: Path) -> None:
    folder, expected = folder_with(source, tmp_path, case), CASES[case]["expected"]
    matrix = read(folder)
    assert [part.type_name for part in matrix.parts] == [KEPT.get(case, "F32")]
    found = torch.from_numpy(matrix.dense(FLOAT32)).reshape(expected.shape)
    assert torch.equal(found.to(expected.dtype), expected)
    assert torch.isfinite(found).all()
    assert np.array_equal(read(folder, BFLOAT16).dense(BFLOAT16), rounded(matrix.dense(FLOAT32), BFLOAT16))


def test_blocks_that_do_not_begin_with_a_row() -> None:
    tensors = {kind: tensor.numpy() for kind, tensor in CASES["bitsandbytes-nf4-odd"].items()}
    codes = read_codes(tensors, (14, 36), "bitsandbytes")
    assert np.array_equal(codes.numbers(slice(None)), tensors["expected"])
    assert np.array_equal(codes.numbers(slice(3, 5)), tensors["expected"][3:5])


def test_the_golden_file_is_what_the_libraries_make_now() -> None:
    pytest.importorskip("compressed_tensors")
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("torchao")
    made = make()
    assert made.keys() == CASES.keys()
    for case, tensors in made.items():
        for kind, tensor in tensors.items():  # as bytes: codes may be declared as floats
            pair = [each.contiguous().reshape(-1).view(torch.uint8) for each in (tensor, CASES[case][kind])]
            assert torch.equal(*pair), (case, kind)


def state(**edit: object) -> torch.Tensor:
    """The JSON of a matrix of bitsandbytes, changed."""
    values = json.loads(bytes(CASES["bitsandbytes-nf4-nested"][NF4].tolist()))
    return torch.tensor(list(json.dumps(values | edit).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("case", "edit", "message"),
    [
        ("bitsandbytes-nf4-nested", {"weight": torch.zeros(2047, 1, dtype=torch.uint8)}, "weight has shape"),
        ("bitsandbytes-nf4-nested", {"weight.quant_map": torch.zeros(15)}, "quant_map has shape"),
        (
            "bitsandbytes-nf4-nested",
            {"weight.quant_map": torch.zeros(16)},
            "quant_map has other values than those of nf4",
        ),
        ("bitsandbytes-nf4-nested", {"weight.nested_absmax": None}, "nested_absmax and nested_quant_map are missing"),
        ("bitsandbytes-nf4-nested", {NF4: state(blocksize=128)}, "blocksize is 128, but 4096 numbers have 64 scales"),
        ("bitsandbytes-nf4-nested", {NF4: state(blocksize=0)}, "blocksize is 0"),
        ("bitsandbytes-nf4-nested", {NF4: state(nested_blocksize="x")}, "nested_blocksize is 'x'"),
        ("bitsandbytes-nf4-nested", {NF4: state(nested_offset=None)}, "nested_offset is None"),
        ("bitsandbytes-nf4-nested", {NF4: state(shape=[32, 128])}, r"shape \[32, 128\]; expected \[64, 64\]"),
        ("bitsandbytes-nf4-nested", {NF4: torch.zeros(9, dtype=torch.uint8)}, "quant_state is not JSON"),
        (
            "bitsandbytes-nf4-nested",
            {NF4: torch.tensor([91, 93], dtype=torch.uint8)},
            "an object is expected, got list",
        ),
        ("bitsandbytes-nf4-nested", {NF4: torch.zeros(1 << 17, dtype=torch.uint8)}, "bitsandbytes__nf4 has shape"),
        ("bitsandbytes-int8", {"weight_format": torch.tensor(2, dtype=torch.uint8)}, "weight_format is 2; only 0"),
        ("bitsandbytes-int8", {"SCB": torch.ones(63)}, r"SCB has shape \(63,\)"),
        ("compressed-tensors-nvfp4", {"weight_scale": torch.zeros(64, 4)}, "weight_scale has type F32"),
        ("compressed-tensors-mxfp4", {"weight_zero_point": torch.zeros(8, 2, dtype=torch.int32)}, "unexpected tensor"),
        ("torchao-int8", {"_weight_act_pre_scale": torch.ones(64)}, "unexpected tensor .*act_pre_scale"),
        ("torchao-int4", {"_weight_scale": torch.ones(64, 2)}, r"_weight_scale has shape \(64, 2\)"),
        ("torchao-intx", {"_weight_zero_point": torch.zeros(64, 2)}, r"_weight_qdata has shape \(64, 64\)"),
    ],
)
def test_what_does_not_fit_is_named(case: str, edit: Tensors, message: str, source: Path, tmp_path: Path) -> None:
    folder = folder_with(source, tmp_path, case, edit)
    with pytest.raises((ModelFileError, UnsupportedModelError), match=message):
        read(folder).dense(FLOAT32)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {f"{STEM}.weight": json.dumps({"_type": "Int4TilePackedTo4dTensor", "_data": {}})},
            "Int4TilePackedTo4dTensor",
        ),
        ({f"{STEM}.weight": json.dumps({"_type": "Int8Tensor"}), "format": "pt", "tensor_names": "[]"}, None),
        ({f"{STEM}.weight": "{", "other": json.dumps({"_type": 5})}, None),
    ],
)
def test_types_of_torchao_are_named(
    metadata: dict[str, str], message: str | None, source: Path, tmp_path: Path
) -> None:
    folder = folder_with(source, tmp_path, "torchao-int8", metadata=metadata)
    if message is None:
        assert read(folder).shape == SHAPE
        return
    with pytest.raises(UnsupportedModelError, match=f"q_proj.weight' is torchao's '{message}'; supported are Int8"):
        read(folder)


def test_an_embedding_may_be_packed_too(source: Path, tmp_path: Path) -> None:
    """Its name is not that of a plain one, which tells how a folder was saved."""
    folder = folder_with(source, tmp_path, "torchao-int8")
    tensors = load_file(folder / "model.safetensors")
    table = tensors.pop("model.embed_tokens.weight")
    tensors["model.embed_tokens._weight_qdata"] = torch.full(table.shape, 3, dtype=torch.int8)
    tensors["model.embed_tokens._weight_scale"] = torch.full((len(table), 1), 0.5)
    save_file(tensors, folder / "model.safetensors")
    weights = dict(load_weights(folder, read_model_config(folder), FLOAT32))
    embedding = weights["model.embed_tokens.weight"]
    assert isinstance(embedding, StoredMatrix)
    assert (embedding.dense(FLOAT32) == 1.5).all()
