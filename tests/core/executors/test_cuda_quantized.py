"""The whole engine with weights that stay quantized on the device: the tokens of the dequantized weights.

In CI the kernels run under Triton's interpreter.
"""

from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import pytest
import torch

from core.executors.cuda import CudaExecutor
from core.model_files.tensors.packed_matrix import unpack as unpack_files
from core.models.config import ExpertParts
from core.models.llama import Llama
from core.models.operations.stored_matrix import StoredMatrix, StoredPart, Weight
from core.models.operations.triton_operations import TritonOperations, pack
from core.models.operations.weight_form import WeightForm
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from kernels.elements import BFLOAT16, FLOAT32, Dtype
from kernels.torch.packed_rows import quantize_rows, unpack
from kernels.torch.tensors import to_array, to_tensor
from kernels.triton.linear import DeviceLinear
from kernels.triton.packed_linear import PackedLinear
from kernels.triton.routed.expert_products import StackedProduct
from kernels.triton.routed.experts import stacked
from kernels.triton.routed.packed_experts import PackedStack, Scratch
from tests.core.executors.test_cuda_architectures import OnDevice
from tests.core.executors.test_cuda_executor import MODELS, VOCAB, ids, run
from tests.core.model_files.packing import awq, random_plain
from tests.core.models.test_llama import Requests, prompts, random_weights, tiny_config
from tests.core.runner.test_invariance_quantized import TYPES
from tests.triton_device import ANYWHERE, DEVICE
from tools.lab.bench.tiny_model import write_tiny_model

pytestmark = ANYWHERE

#: Depths are multiples of 32 and, but the intermediate one, of 64.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "head_dim": 16,
    "qkv_bias": True,
}


def stored_weights(weights: dict[str, Any]) -> dict[str, Weight]:
    """Matrices in the types of TYPES: four bits, also of several types within a merged matrix."""
    stored: dict[str, Weight] = dict(weights)
    for name, numbers in weights.items():
        if numbers.ndim == 2:
            type_name = TYPES[name.split(".")[-2]]
            blocks = gguf.quantize(numbers, gguf.GGMLQuantizationType[type_name])
            stored[name] = StoredMatrix([StoredPart(type_name, blocks, numbers.shape[1])])
    return stored


def in_8_bits(numbers: Any) -> Any:
    packed = quantize_rows(to_tensor(numbers))
    assert packed is not None
    return to_array(unpack(packed))


def dense(weight: Weight) -> Any:
    return weight.dense(FLOAT32) if isinstance(weight, StoredMatrix) else weight


def models(form: WeightForm) -> tuple[Llama, Llama]:
    """A model of dequantized weights on the CPU, and the quantized one on the device."""
    config = tiny_config(**SIZES)
    weights: dict[str, Any] = dict(random_weights(config, FLOAT32))
    if form is WeightForm.STORED:
        given: dict[str, Weight] = stored_weights(weights)
        numbers = {name: dense(weight) for name, weight in given.items()}
    else:
        given = weights
        whole = {"model.embed_tokens.weight"}
        numbers = {n: in_8_bits(w) if w.ndim == 2 and n not in whole else w for n, w in weights.items()}
    operations = TritonOperations(config, FLOAT32, DEVICE, form)
    return Llama(config, numbers.items(), FLOAT32), Llama(config, given.items(), FLOAT32, operations=operations)


@pytest.mark.parametrize("form", [WeightForm.INT8, WeightForm.STORED])
def test_tokens_are_those_of_the_dequantized_weights(form: WeightForm) -> None:
    MODELS[form.name] = models(form)
    requests = [
        (ids(length, length), SamplingParams(max_tokens=5, ignore_eos=True, temperature=length % 2))
        for length in (1, 20, 45)
    ]
    expected = run("torch", requests, shape=form.name).tokens
    assert run("triton", requests, depth=2, shape=form.name).tokens == expected


def test_the_form_is_in_the_models_fingerprint() -> None:
    variants = [models(form)[1].variant for form in (WeightForm.INT8, WeightForm.STORED)]
    assert ["gate_up=triton-int8." in variant for variant in variants] == [True, False]
    assert ["gate_up=triton-stored." in variant for variant in variants] == [False, True]


def test_what_has_no_packed_form_is_dequantized() -> None:
    config = tiny_config(**SIZES)
    weights = dict(random_weights(config, FLOAT32))
    mixed = stored_weights(weights)
    mixed["model.layers.0.self_attn.k_proj.weight"] = weights["model.layers.0.self_attn.k_proj.weight"]
    layers = Llama(
        config, mixed.items(), FLOAT32, operations=TritonOperations(config, FLOAT32, DEVICE, WeightForm.STORED)
    ).layers
    kinds = {name: type(product) for name, product in layers[0].products.items()}
    assert kinds == {"qkv": DeviceLinear, "o": PackedLinear, "gate_up": PackedLinear, "down": PackedLinear}


@pytest.mark.parametrize("quantization", ["auto", "none", "stored", "int8"])
def test_the_option_reaches_the_operations(quantization: str, tmp_path: Path) -> None:
    """The model's weights are bfloat16: only int8 packs them, and only where the option says so."""
    write_tiny_model(tmp_path)
    executor = CudaExecutor(EngineConfig(model=str(tmp_path), device="cuda", quantization=cast(Any, quantization)))
    model = executor._loaded.model
    assert isinstance(model, Llama)
    expected = PackedLinear if quantization == "int8" else DeviceLinear
    assert all(isinstance(product, expected) for product in (*model.layers[0].products.values(), model.head))


@pytest.mark.parametrize(("type_name", "dtype"), [("Q4_0", BFLOAT16), ("Q8_0", FLOAT32)])
def test_experts_stay_quantized_and_have_the_bits_of_dense_ones(type_name: str, dtype: Dtype) -> None:
    """Also for tokens that choose few of them, after others did, in two layers that unpack into the same memory."""
    parts = ExpertParts(num_experts=5, num_chosen=2, intermediate_size=64, normalises=True, shared_size=32)
    config = tiny_config(**{**SIZES, "num_hidden_layers": 2, "experts": parts})
    weights, quantized = dict(random_weights(config, FLOAT32)), dict[str, Weight]()
    for name, numbers in weights.items():
        if "expert" in name and numbers.ndim == 2:
            blocks = gguf.quantize(numbers, gguf.GGMLQuantizationType[type_name])
            quantized[name] = StoredMatrix([StoredPart(type_name, blocks, numbers.shape[1])])
    unpacked = {name: dense(weight) for name, weight in quantized.items()}
    answers = []
    for given, form in ((quantized, WeightForm.STORED), (unpacked, WeightForm.DENSE)):
        operations = TritonOperations(config, dtype, DEVICE, form)
        model = Llama(config, {**weights, **given}.items(), dtype, operations=operations)
        experts = [cast(Any, layer.mlp).experts for layer in model.layers]
        kind = PackedStack if form is WeightForm.STORED else StackedProduct
        assert {type(product) for one in experts for product in (one.gate_up, one.down)} == {kind}
        requests = Requests(OnDevice(model), prompts(30, 9, vocab_size=VOCAB))
        steps = [requests.step(counts) for counts in ({0: 20, 1: 8}, {0: 1}, {1: 1, 0: 2})]
        answers.append(torch.cat([logits for step in steps for logits in step.values()]))
    assert answers[0].isfinite().all()
    assert torch.equal(*answers)


def test_experts_of_several_types_are_dequantized() -> None:
    matrix = np.random.default_rng(0).standard_normal((32, 64), np.float32)
    products = []
    for type_name in ("Q8_0", "Q4_0"):
        blocks = gguf.quantize(matrix, gguf.GGMLQuantizationType[type_name])
        packed = pack(StoredMatrix([StoredPart(type_name, blocks, 64)]), WeightForm.STORED, DEVICE)
        assert packed is not None
        products.append(PackedLinear(packed, None, torch.float32, torch.float32, name="stored"))
    expected = torch.stack([product.dense_weight() for product in products])
    found = stacked(products, Scratch())
    assert isinstance(found, StackedProduct)
    assert torch.equal(found.weight, expected)
    assert all(not product.parts for product in products)


def test_awq_takes_four_bits() -> None:
    """Its groups have zeros; as five bits, which the CPU needs for them, it would take eight here."""
    plain = random_plain((16, 128), 2, 4)
    tensors = {name: to_array(tensor) for name, tensor in awq(plain).items()}
    parts = pack(unpack_files(tensors, (16, 128), "awq", FLOAT32), WeightForm.STORED, DEVICE)
    assert parts is not None
    assert [part.in_4_bits for part in parts] == [True]
    np.testing.assert_array_equal(unpack(parts[0]).cpu().numpy(), plain.weights)


def test_numbers_of_8_bits_are_others() -> None:
    """Else the tokens above would say nothing of the option."""
    numbers = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    assert not np.array_equal(in_8_bits(numbers), numbers)


@pytest.mark.parametrize(
    "scale", [np.full((1, 1), 0.01), np.arange(1, 133)[:, None] / 3000, np.array([[0.01, 0.3], [1e-4, 2.0]])]
)
def test_fp8_stays_or_becomes_8_bits(scale: Any) -> None:
    """A scale for all, for each row, and for blocks of 128 x 128."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 0x7F, (132, 192), np.uint8) | rng.integers(0, 2, (132, 192), np.uint8) << np.uint8(7)
    tensors = {"weight": codes, "weight_scale_inv": scale.astype(np.float32)}
    matrix = unpack_files(tensors, (132, 192), "fp8", FLOAT32)
    assert [part.type_name for part in matrix.parts] == ["FP8"]
    stored = pack(matrix, WeightForm.STORED, DEVICE)
    assert stored is not None
    assert np.array_equal(stored[0].codes.cpu().numpy(), codes)
    assert np.array_equal(to_array(unpack(stored[0]).cpu()), matrix.dense(FLOAT32))
    for dtype in (torch.float32, torch.bfloat16):
        kept = PackedLinear(stored, None, dtype, torch.float32, name="stored")
        weights = to_tensor(matrix.dense(FLOAT32)).to(DEVICE, dtype)
        x = torch.randn(130, 192, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
        expected = DeviceLinear(weights, None, torch.float32)(x)
        for rows in (x[:3], x[:20], x):
            assert torch.equal(kept(rows), expected[: len(rows)])
    parts = pack(matrix, WeightForm.INT8, DEVICE)
    assert parts is not None
    assert np.array_equal(to_array(unpack(parts[0])), in_8_bits(matrix.dense(FLOAT32)))
