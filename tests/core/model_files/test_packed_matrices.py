"""Quantized safetensors folders: the weights of every packing, as blocks or dense, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from core.model_files.model_config import read_model_config
from core.model_files.tensors.packed_matrix import unpack
from core.model_files.tensors.weight_shapes import expected_shapes
from core.model_files.tensors.weights import load_weights
from core.models.operations.stored_matrix import StoredMatrix
from frontend.llm import LLM
from ipc.errors import ModelFileError, UnsupportedModelError
from ipc.params.sampling_params import SamplingParams
from kernels.elements import BFLOAT16, FLOAT32, rounded
from kernels.rounding import ceil_div
from tests.core.model_files.packing import Plain, Tensors, awq, compressed, eight_bits, gptq, random_plain
from tests.core.model_files.tensors.test_weights import dense_weights
from tests.numbers import dense_tensor
from tools.lab.bench.tiny_model import write_tiny_model

SHAPE = (48, 128)


def arrays(tensors: Tensors) -> dict[str, Any]:
    """As core/model_files/tensors/weights.py reads them: F8_E4M3 as bytes."""
    kinds = {name: t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for name, t in tensors.items()}
    return {name: tensor.numpy() for name, tensor in kinds.items() if name != "weight_shape"}


def check(matrix: StoredMatrix, plain: Plain, kind: str) -> None:
    assert [part.type_name for part in matrix.parts] == [kind]
    for dtype in (FLOAT32, BFLOAT16):
        if kind not in ("F32", "BF16") or kind == ("F32" if dtype == FLOAT32 else "BF16"):
            assert np.array_equal(matrix.dense(dtype), rounded(plain.weights, dtype))


@pytest.mark.parametrize(
    ("bits", "symmetric", "kind"),
    [
        (4, True, "Q4_0"),
        (4, False, "Q5_0"),
        (2, False, "Q4_0"),
        (3, True, "Q4_0"),
        (8, True, "Q8_0"),
        (8, False, "F32"),
    ],
)
@pytest.mark.parametrize("groups", [1, 4])
def test_gptq_v2_and_compressed_tensors(bits: int, symmetric: bool, kind: str, groups: int) -> None:
    plain = random_plain(SHAPE, groups, bits, symmetric=symmetric)
    check(unpack(arrays(gptq(plain, is_less_one=False)), SHAPE, "gptq_v2", FLOAT32), plain, kind)
    packed = compressed(plain, symmetric=symmetric)
    check(unpack(arrays(packed), SHAPE, "compressed-tensors", FLOAT32), plain, kind)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptq_stores_zeros_less_one(bits: int) -> None:
    plain = random_plain(SHAPE, 4, bits, seed=1)
    assert (plain.zeros == 0).any() or bits == 8  # less one, they borrow from their neighbours
    matrix = unpack(arrays(gptq(plain, is_less_one=True)), SHAPE, "gptq", FLOAT32)
    assert np.array_equal(matrix.dense(FLOAT32), plain.weights)


def test_gptq_of_3_bits_stores_each_zero_less_one() -> None:
    plain = random_plain(SHAPE, 4, 3, seed=2)
    tensors = arrays(gptq(plain._replace(zeros=(plain.zeros - 1) % 8), is_less_one=False))
    assert np.array_equal(unpack(tensors, SHAPE, "gptq", FLOAT32).dense(FLOAT32), plain.weights)


def test_awq_has_its_own_order_of_columns() -> None:
    plain = random_plain(SHAPE, 2, 4, seed=3)
    check(unpack(arrays(awq(plain)), SHAPE, "awq", FLOAT32), plain, "Q5_0")


def test_columns_in_the_order_of_their_importance_make_the_matrix_dense() -> None:
    plain = random_plain(SHAPE, 4, 4, symmetric=True, shuffled=True)
    for tensors, packing in (
        (gptq(plain, is_less_one=False), "gptq_v2"),
        (compressed(plain, symmetric=True), "compressed-tensors"),
    ):
        for dtype, kind in ((FLOAT32, "F32"), (BFLOAT16, "BF16")):
            check(unpack(arrays(tensors), SHAPE, packing, dtype), plain, kind)


def test_int8_with_a_scale_for_each_row() -> None:
    plain = random_plain(SHAPE, 1, 8, symmetric=True)
    check(unpack(arrays(eight_bits(plain)), SHAPE, "compressed-tensors", FLOAT32), plain, "Q8_0")
    odd = plain._replace(scales=plain.scales * np.float32(1.0001))  # no float16
    expected = odd.scales * (odd.codes - 128).astype(np.float32)
    matrix = unpack(arrays(eight_bits(odd)), SHAPE, "compressed-tensors", FLOAT32)
    assert np.array_equal(matrix.dense(FLOAT32), expected)


@pytest.mark.parametrize(
    ("kind", "shape", "scales"),
    [("weight_scale_inv", (200, 300), (2, 3)), ("weight_scale", (200, 300), (200, 1)), ("weight_scale", (8, 64), ())],
)
def test_fp8_with_scales_of_blocks_rows_and_all(kind: str, shape: tuple[int, int], scales: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(scales, generator=generator).to(torch.bfloat16)
    wide = scale.float()
    if kind == "weight_scale_inv":
        wide = wide.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    tensors = {"weight": weight.view(torch.uint8).numpy(), kind: scale.view(torch.uint16).numpy()}
    matrix = unpack(tensors, shape, "fp8", FLOAT32)
    assert np.array_equal(matrix.dense(FLOAT32), (weight.float() * wide).numpy())


def test_every_number_of_e4m3() -> None:
    octets = np.arange(256, dtype=np.uint8).reshape(4, 64)
    expected = torch.from_numpy(octets).view(torch.float8_e4m3fn).float().numpy()
    tensors = {"weight": octets, "weight_scale": np.ones(1, np.float32)}
    found = unpack(tensors, (4, 64), "fp8", FLOAT32).dense(FLOAT32)
    assert np.array_equal(found, expected, equal_nan=True)


# --- whole folders ------------------------------------------------------------------------------------------------

CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group"}}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    },
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return folder


def quantized_folder(source: Path, folder: Path, packing: str, *, plain: bool) -> Path:
    """The tiny model with its layers' matrices packed; plain: the same weights as F32."""
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    model = read_model_config(source)
    tensors = {name: dense_tensor(weight, FLOAT32) for name, weight in load_weights(source, model, FLOAT32)}
    for seed, (name, shape) in enumerate(expected_shapes(model).items()):
        if len(shape) < 2 or "layers" not in name:
            continue
        if packing == "fp8":
            del tensors[name]
            tensors |= fp8_matrix(name.removesuffix(".weight"), shape, seed, plain=plain)
            continue
        matrix = random_plain((shape[0], shape[1]), shape[1] // 32, 4, seed, symmetric=packing == "compressed-tensors")
        if plain:
            tensors[name] = torch.from_numpy(matrix.weights)
            continue
        del tensors[name]
        makers = {"gptq": lambda m: gptq(m, is_less_one=True), "awq": awq, "compressed-tensors": symmetric_packed}
        stem = name.removesuffix(".weight")
        tensors |= {f"{stem}.{kind}": tensor for kind, tensor in makers[packing](matrix).items()}
        if packing == "gptq" and ".q_proj" in name:
            tensors[f"{stem}.bias"] = torch.zeros(shape[0], dtype=torch.float16)  # as AutoGPTQ writes it
    if not plain:
        config["quantization_config"] = CONFIGS[packing]
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def fp8_matrix(stem: str, shape: tuple[int, ...], seed: int, *, plain: bool) -> Tensors:
    """A matrix in FP8, with scales of blocks; plain: its numbers."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand([ceil_div(size, 128) for size in shape], generator=generator) * 0.1
    wide = scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    if plain:
        return {f"{stem}.weight": codes.float() * wide}
    return {f"{stem}.weight": codes, f"{stem}.weight_scale_inv": scales}


def symmetric_packed(plain: Plain) -> Tensors:
    return compressed(plain, symmetric=True)


@pytest.mark.parametrize("packing", CONFIGS)
def test_a_folder_generates_what_its_weights_generate(packing: str, source: Path, tmp_path: Path) -> None:
    folders = []
    for plain in (True, False):
        folder = tmp_path / str(plain)
        folder.mkdir()
        folders.append(quantized_folder(source, folder, packing, plain=plain))
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
    answers = []
    for folder in folders:
        for dtype in ("float32", "bfloat16") if packing == "gptq" else ("bfloat16",):
            form = "stored" if packing == "fp8" else "auto"
            options: dict[str, Any] = {
                "threads": 1,
                "max_model_len": 64,
                "skip_tokenizer_init": True,
                "quantization": form,
            }
            with LLM(str(folder), dtype=dtype, **options) as llm:
                (output,) = llm.generate([{"prompt_token_ids": [3, 5, 7, 11]}], params)
                answers.append((output.outputs[0].token_ids, output.outputs[0].cumulative_logprob))
    assert answers[: len(answers) // 2] == answers[len(answers) // 2 :]


Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("packing", "edit", "message"),
    [
        ("gptq", {"qzeros": torch.zeros(2, 2, dtype=torch.int32)}, r"q_proj: qzeros has shape \(2, 2\); a matrix"),
        ("gptq", {"qweight": torch.zeros(7, 64, dtype=torch.int32)}, r"q_proj: qweight has shape \(7, 64\)"),
        ("gptq", {"scales": torch.zeros(2, 64, dtype=torch.int32)}, "q_proj: scales has type I32; gptq has F16 or"),
        ("gptq", {"g_idx": torch.full((64,), 2, dtype=torch.int32)}, "g_idx has groups from 2 to 2; there are 2"),
        ("gptq", {"bias": torch.ones(64, dtype=torch.float16)}, r"unexpected tensor '.*q_proj\.bias'"),
        ("gptq", {"qzeros": None}, r"q_proj\.weight is missing"),
        ("compressed-tensors", {"weight_scale": torch.zeros(64, 3)}, r"weight_scale has shape \(64, 3\)"),
    ],
)
def test_what_does_not_fit_is_named(
    packing: str, edit: dict[str, torch.Tensor | None], message: str, source: Path, tmp_path: Path
) -> None:
    folder = quantized_folder(source, tmp_path, packing, plain=False)
    tensors = load_file(folder / "model.safetensors")
    for kind, tensor in edit.items():
        tensors.pop(f"{Q_PROJ}.{kind}", None)
        if tensor is not None:
            tensors[f"{Q_PROJ}.{kind}"] = tensor
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises((ModelFileError, UnsupportedModelError), match=message):
        dense_weights(load_weights(folder, read_model_config(folder), FLOAT32))


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "hqq"}, 'quant_method=.hqq. is not supported; supported: "gptq", "awq"'),
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type='int4'"),
        ({"quant_method": ["gptq"]}, "quant_method="),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ({"quant_method": "gptq", "is_marlin_format": True}, "is_marlin_format=True"),
        ({"quant_method": "awq", "version": "gemv"}, "version='gemv'"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:fp8"}, "packing_format='auto_round:fp8'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo='NVFP4' is not supported; supported: .FP8."),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format='marlin-24'"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"format": "mxfp6-pack-quantized"}}},
            "format='mxfp6-pack-quantized'",
        ),
        ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {}}}}, "transform_config="),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    quantization: dict[str, Any], message: str, source: Path, tmp_path: Path
) -> None:
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=message):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("quantization", "packing"),
    [
        ({"quant_method": "gptq"}, "gptq"),
        ({"quant_method": "gptq", "checkpoint_format": "gptq_v2"}, "gptq_v2"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}, "gptq"),
        ({"quant_method": "auto-round", "packing_format": "auto_round"}, "gptq_v2"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}, "awq"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "compressed-tensors"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}, "torchao"),
    ],
)
def test_packing_of_a_config(quantization: dict[str, Any], packing: str, source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model_config(tmp_path).packing == packing


def test_model_optimizer_has_a_file_of_its_own(source: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    for algorithm, packing in ((None, "none"), ("FP8", "fp8")):
        found = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(found))
        assert read_model_config(tmp_path).packing == packing
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(UnsupportedModelError, match=r"quant_algo='W4A8_AWQ' is not supported"):
        read_model_config(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": 1}))
    with pytest.raises(ModelFileError, match="quantization must be"):
        read_model_config(tmp_path)
