"""A model whose products are in 8 bits: a request's bits are its own in every variant, and no other form's."""

from collections.abc import Iterator

import numpy as np
import pytest

from core.models.llama import Llama
from core.models.operations.weight_form import WeightForm
from kernels.cpu.build import usable_variants
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.library import load_cpu_library
from kernels.cpu.packed_weights import INT8
from kernels.elements import BFLOAT16, FLOAT32, Dtype
from tests.core.models.test_llama import Requests, prompts
from tests.core.runner.invariance import KINDS, difference, random_weights, run
from tests.core.runner.invariance_scenarios import PROMPT, SCENARIOS, scenario
from tests.core.runner.test_invariance_quantized import quantized_weights

#: One scenario of each group. The others differ in what the scheduler does, not in the products' shapes.
FIRST = {each.group: name for name, each in reversed(SCENARIOS.items())}


@pytest.fixture(params=usable_variants())
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    load_cpu_library(request.param).stop_threads()


def model_in_8_bits(kind: str, variant: str | None, dtype: Dtype = BFLOAT16, *, is_plain: bool = False) -> Llama:
    """is_plain: from a checkpoint that is not quantized."""
    weights = random_weights(KINDS[kind], dtype) if is_plain else quantized_weights(kind)
    return Llama(KINDS[kind], weights.items(), dtype, library=load_cpu_library(variant), form=WeightForm.INT8)


def test_a_request_in_any_company_has_the_logits_that_it_has_alone(variant: str) -> None:
    model = model_in_8_bits("plain", variant)
    library = load_cpu_library(variant)
    products = [*model.layers[1].products.values(), model.head]
    assert [product.packing for product in products if isinstance(product, PackedMatrix)] == [INT8] * 5
    alone = run(model, PROMPT)
    library.start_threads(2)
    for name in FIRST.values():
        assert difference(scenario(name, model, mixes=False), alone) == "", name


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
def test_a_checkpoint_that_is_not_quantized_is_quantized_at_load(dtype: Dtype) -> None:
    model = model_in_8_bits("untied head", None, dtype, is_plain=True)
    products = [*model.layers[0].products.values(), model.head]
    assert [product.packing for product in products if isinstance(product, PackedMatrix)] == [INT8] * 5
    exact = Llama(
        KINDS["untied head"], random_weights(KINDS["untied head"], dtype).items(), dtype, library=load_cpu_library()
    )
    found, expected = (Requests(each, prompts(40)).step({0: 40})[0].numpy() for each in (model, exact))
    assert not np.array_equal(found, expected)
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.99  # as far as weights of noise let it be
    assert "int8" in model.variant
    assert "int8" not in exact.variant


@pytest.mark.parametrize("threads", [1, 2])
def test_one_call_has_the_bits_of_one_operation_after_the_other(threads: int) -> None:
    """With many rows threads are at products of different depths at the same time."""
    library = load_cpu_library()
    library.start_threads(threads)
    model = model_in_8_bits("plain", None)
    for count in (1, 9, 300):
        requests = Requests(model, prompts(count))
        one = requests.step({0: count})[0].numpy()
        model.decoder, decoder = None, model.decoder
        other = Requests(model, prompts(count)).step({0: count})[0].numpy()
        model.decoder = decoder
        assert np.array_equal(one.view(np.uint32), other.view(np.uint32)), count
    library.stop_threads()
