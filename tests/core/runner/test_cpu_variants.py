"""Every variant of the C kernels that this CPU runs holds level L2, and computes what the fingerprint says."""

import hashlib
from collections.abc import Iterator

import pytest

from core.models.llama import Llama
from kernels.cpu.build import VARIANTS, runnable_variants
from kernels.cpu.library import arithmetic_of, load_cpu_library
from kernels.elements import FLOAT32
from tests.core.runner.invariance import DTYPES, KINDS, difference, run, tiny_model
from tests.core.runner.invariance_scenarios import ONE_OF_EACH, PROMPT, SCENARIOS, scenario

NEON = ("neon_bf16", "neon_dot", "neon")  # of ARM64: all give the same bits (make arm)

#: Digests of a run's logits, by the number of the arithmetic, variant and dtype. If a change to the kernels changes
#: one, raise the variant's version and write down the new ones: engines with equal fingerprints must give equal tokens.
DIGESTS: dict[tuple[int, str, str], str] = {
    (2, "amx", "float32"): "4e5bec27842e5d26",
    (2, "amx", "bfloat16"): "3945f8b2221c92a2",
    (1, "avx512bf16", "float32"): "4e5bec27842e5d26",
    (1, "avx512bf16", "bfloat16"): "993d40bb00b751ee",
    (1, "avx512", "float32"): "4e5bec27842e5d26",
    (1, "avx512", "bfloat16"): "900a8b33613038e4",
    (1, "avx2", "float32"): "d1fd719dbb158d86",
    (1, "avx2", "bfloat16"): "036ac88fc533b722",
    **{(1, variant, "float32"): "4243da838f9c8d2f" for variant in NEON},
    **{(1, variant, "bfloat16"): "5d985a0e68861668" for variant in NEON},
    (1, "portable", "float32"): "14b17b327dc62800",
    (1, "portable", "bfloat16"): "5d985a0e68861668",
}

USABLE = runnable_variants()


@pytest.fixture(params=USABLE)
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    load_cpu_library(request.param).stop_threads()


SOAKED = ("plain", "sinks", "beside attention", "gated delta")
OTHERS = ("local and global", "centred head norms", "head norms after rotation")


#: Each variant with each of the others in one of the dtypes, and in both dtypes; the rest are the soak's.
CASES = [
    pytest.param(dtype, kind, variant, marks=[pytest.mark.soak] if kind in SOAKED or sum(places) % 2 else [])
    for *places, dtype, kind, variant in (
        (row, column, number, dtype, kind, variant)
        for row, dtype in enumerate(DTYPES)
        for column, kind in enumerate((*OTHERS, *SOAKED))
        for number, variant in enumerate(USABLE)
    )
]


@pytest.mark.parametrize(("dtype", "kind", "variant"), CASES, indirect=["variant"])
def test_a_request_in_any_company_has_the_logits_it_has_alone(dtype: str, kind: str, variant: str) -> None:
    model = tiny_model(DTYPES[dtype], kind, variant)
    assert model.numerics == "L2"
    assert f"c-{variant}" in model.variant
    alone = run(model, PROMPT)
    for name in SCENARIOS if kind in SOAKED else ONE_OF_EACH:
        assert difference(scenario(name, model, mixes=kind in SOAKED), alone) == "", name


def digest(model: Llama) -> str:
    """Hex, of the logits of a prompt's last token and of fifteen greedy ones, a sliding layer among the layers."""
    logits = run(model, PROMPT, temperature=0.0).logits[0]
    return hashlib.blake2b(logits.tobytes(), digest_size=8).hexdigest()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_arithmetic_is_that_of_its_number(dtype: str, variant: str) -> None:
    assert (
        digest(tiny_model(DTYPES[dtype], "local and global", variant))
        == DIGESTS[arithmetic_of(variant), variant, dtype]
    )


def test_the_digest_would_show_another_arithmetic() -> None:
    models = [tiny_model(FLOAT32, kind) for kind in KINDS]
    assert len({digest(model) for model in models}) == len(KINDS)


def test_every_variant_has_its_digests() -> None:
    assert {(arithmetic_of(variant), variant, dtype) for variant in VARIANTS for dtype in DTYPES} == set(DIGESTS)
