"""A model whose KV cache is in 8 bits: a request's bits are its own in every variant, and no other cache's."""

import hashlib
from collections.abc import Iterator

import numpy as np
import pytest

from core.models.llama import Llama
from kernels.cpu.build import VARIANTS, runnable_variants
from kernels.cpu.kv_cache import CpuKVCache
from kernels.cpu.library import arithmetic_of, load_cpu_library
from kernels.cpu.quantized_kv_cache import QuantizedKVCache
from kernels.elements import BFLOAT16, Dtype
from tests.core.models.test_cpu_decoder import run as run_steps
from tests.core.models.test_cpu_decoder import same_bits
from tests.core.runner import test_preemption_model
from tests.core.runner.invariance import DTYPES, KINDS, difference, random_weights, run, tiny_model
from tests.core.runner.invariance_scenarios import ONE_OF_EACH, PROMPT, scenario

#: As DIGESTS of test_cpu_variants.py, with this cache.
DIGESTS: dict[tuple[int, str, str], str] = {
    (2, "amx", "float32"): "11464b078d99a408",
    (2, "amx", "bfloat16"): "988a37a38397d392",
    (1, "avx512bf16", "float32"): "11464b078d99a408",
    (1, "avx512bf16", "bfloat16"): "52d9a356531fdddd",
    (1, "avx512", "float32"): "11464b078d99a408",
    (1, "avx512", "bfloat16"): "42ad372182343d3c",
    (1, "avx2", "float32"): "2c8dab846c08abab",
    (1, "avx2", "bfloat16"): "f411c68d1f6bec06",
    (1, "neon_bf16", "float32"): "4f500189dd855c95",
    (1, "neon_bf16", "bfloat16"): "277d2b612f903284",
    (1, "neon_dot", "float32"): "4f500189dd855c95",
    (1, "neon_dot", "bfloat16"): "277d2b612f903284",
    (1, "neon", "float32"): "4f500189dd855c95",
    (1, "neon", "bfloat16"): "277d2b612f903284",
    (1, "portable", "float32"): "01590ccbdbe34aa7",
    (1, "portable", "bfloat16"): "e5a5ca22efd2a04a",
}


@pytest.fixture(params=runnable_variants())
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    load_cpu_library(request.param).stop_threads()


#: Each variant with one of the dtypes, in turn; the other is the soak's.
CASES = [
    pytest.param(dtype, variant, marks=[pytest.mark.soak] if (row + column) % 2 else [])
    for row, dtype in enumerate(DTYPES)
    for column, variant in enumerate(runnable_variants())
]


def model_of(kind: str, dtype: Dtype, variant: str | None = None, cache: type[CpuKVCache] = QuantizedKVCache) -> Llama:
    weights = random_weights(KINDS[kind], dtype).items()
    return Llama(KINDS[kind], weights, dtype, library=load_cpu_library(variant), cache_type=cache)


@pytest.mark.parametrize(("dtype", "variant"), CASES, indirect=["variant"])
def test_a_request_in_any_company_has_the_logits_that_it_has_alone(dtype: str, variant: str) -> None:
    model, library = model_of("local and global", DTYPES[dtype], variant), load_cpu_library(variant)
    alone = run(model, PROMPT, temperature=0.0)
    library.start_threads(2)
    for name in ONE_OF_EACH:
        assert difference(scenario(name, model, mixes=False, temperature=0.0), alone) == "", name


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_arithmetic_is_that_of_its_number(dtype: str, variant: str) -> None:
    alone = run(model_of("local and global", DTYPES[dtype], variant), PROMPT, temperature=0.0)
    digest = hashlib.blake2b(alone.logits[0].tobytes(), digest_size=8).hexdigest()
    assert DIGESTS.get((arithmetic_of(variant), variant, dtype)) == digest


def test_every_variant_has_its_digests() -> None:
    assert {(arithmetic_of(variant), variant, dtype) for variant in VARIANTS for dtype in DTYPES} == set(DIGESTS)


@pytest.mark.parametrize("kind", [kind for kind, config in KINDS.items() if config.streams is None])
def test_one_call_gives_the_bits_of_many(kind: str) -> None:
    model = model_of(kind, BFLOAT16)
    for mine, expected in zip(run_steps(model, False), run_steps(model, True), strict=True):
        assert same_bits(mine, expected)


def test_choices_that_part_in_the_middle_of_a_block_have_the_logits_they_have_alone() -> None:
    model, options = model_of("plain", BFLOAT16), {"params": {"n": 3}}
    alone = run(model, PROMPT, **options)
    assert len(alone.tokens) == 3
    for name in ("among 32", "chunks of 37", "preempted"):
        assert difference(scenario(name, model, **options), alone) == "", name


def test_blocks_that_were_swapped_out_come_back_with_their_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_weights(test_preemption_model.SMALL, BFLOAT16).items()
    model = Llama(
        test_preemption_model.SMALL, weights, BFLOAT16, library=load_cpu_library(), cache_type=QuantizedKVCache
    )
    monkeypatch.setattr(test_preemption_model, "model", lambda dtype: model)
    alone = test_preemption_model.run(BFLOAT16, max_num_seqs=1, num_blocks_override=100, enable_prefix_caching=False)
    pressed = test_preemption_model.run(
        BFLOAT16, max_num_seqs=6, num_blocks_override=14, preemption_mode="swap", num_swap_blocks=40
    )
    assert pressed.num_swapped_in_blocks > 0
    assert pressed.tokens == alone.tokens


def test_the_fingerprint_names_the_cache() -> None:
    mine, usual = model_of("plain", BFLOAT16), tiny_model(BFLOAT16)
    assert mine.variant == f"{usual.variant} kv=int8"
    assert isinstance(mine.allocate_cache(4, 16), QuantizedKVCache)
    assert mine.bytes_per_block(16) * 2 * 16 == usual.bytes_per_block(16) * (16 + 4)  # heads of 16 numbers


def test_logits_are_near_those_of_a_whole_cache() -> None:
    mine, usual = (run(model_of("plain", BFLOAT16, cache=each), PROMPT) for each in (QuantizedKVCache, CpuKVCache))
    found, expected = mine.logits[0][0], usual.logits[0][0]
    assert not np.array_equal(found, expected)
    assert np.corrcoef(found, expected)[0, 1] > 0.999
