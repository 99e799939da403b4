"""A model of quantized weights: a request's bits are its own, and those of the dequantized model, in every variant."""

from collections.abc import Iterator

import gguf
import numpy as np
import pytest

from core.models.llama import Llama
from core.models.operations.stored_matrix import StoredMatrix, StoredPart, Weight
from kernels.cpu.build import runnable_variants
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.library import load_cpu_library
from kernels.cpu.packed_weights import QUANTIZED
from kernels.elements import BFLOAT16, FLOAT32
from tests.core.runner.invariance import KINDS, difference, random_weights, run
from tests.core.runner.invariance_scenarios import ONE_OF_EACH, PROMPT, scenario

#: Type of each matrix by the last part of its name. V has another type than Q and K.
TYPES = {
    "embed_tokens": "Q8_0",
    "q_proj": "Q4_1",
    "k_proj": "Q4_1",
    "v_proj": "Q8_0",
    "o_proj": "Q4_0",
    "kv_a_proj": "Q8_0",
    "kv_b_proj": "Q5_0",
    "gate_proj": "Q5_0",
    "up_proj": "Q5_0",
    "down_proj": "Q5_1",
    "lm_head": "Q5_1",
}


def quantized_weights(kind: str) -> dict[str, Weight]:
    """The weights of the tiny model, its matrices in blocks of 32: those that are listed and that blocks divide."""
    weights: dict[str, Weight] = dict(random_weights(KINDS[kind], FLOAT32))
    for name, numbers in weights.items():
        if not isinstance(numbers, np.ndarray) or numbers.ndim != 2 or numbers.shape[1] % 32:
            continue
        if (type_name := TYPES.get(name.split(".")[-2])) is not None:
            blocks = gguf.quantize(numbers, gguf.GGMLQuantizationType[type_name])
            weights[name] = StoredMatrix([StoredPart(type_name, blocks, numbers.shape[1])])
    return weights


@pytest.fixture(params=runnable_variants())
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    load_cpu_library(request.param).stop_threads()


#: Each kind with half of the variants and each variant with one or two of the kinds; the others are the soak's.
CASES = [
    pytest.param(kind, variant, marks=[pytest.mark.soak] if (row + column) % 2 else [])
    for row, kind in enumerate(("plain", "untied head", "latent attention"))
    for column, variant in enumerate(runnable_variants())
]


@pytest.mark.parametrize(("kind", "variant"), CASES, indirect=["variant"])
def test_a_request_in_any_company_has_the_logits_of_the_dequantized_model_alone(kind: str, variant: str) -> None:
    weights, library = quantized_weights(kind), load_cpu_library(variant)
    dense = {n: StoredMatrix.of(w.dense(BFLOAT16)) if isinstance(w, StoredMatrix) else w for n, w in weights.items()}
    model, whole = (Llama(KINDS[kind], w.items(), BFLOAT16, library=library) for w in (weights, dense))
    products = {name: product.packing for name, product in model.layers[1].products.items() if name != "latent"}
    assert products == dict.fromkeys(("qkv", "o", "gate_up", "down"), QUANTIZED)
    assert isinstance(model.head, PackedMatrix)
    assert model.head.packing == QUANTIZED
    assert model.variant == whole.variant
    alone = run(whole, PROMPT)
    for name in ONE_OF_EACH:
        assert difference(scenario(name, model, mixes=False), alone) == "", name
