"""Layers with a recurrent state: the C kernel against the definition in NumPy; a token's bits are its request's own."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kernels.arrays import Floats, Ints
from kernels.cpu.build import VARIANTS, runnable_variants
from kernels.cpu.elementwise import open_gates
from kernels.cpu.library import CpuLibrary, arithmetic_of, load_cpu_library
from kernels.cpu.recurrence import CpuRecurrence
from kernels.elements import BFLOAT16, FLOAT32, Dtype, Numbers, rounded, to_floats
from kernels.memory.states import allocate_states
from kernels.recurrence import MIXED_ROWS, RecurrenceParts, RecurrenceSizes, StateRows, recur

#: Channels and values that end within a vector, a strip and a cache line; several heads to a group.
SIZES = {
    "short convolution": RecurrenceSizes("short convolution", 3, 75),
    "gated delta": RecurrenceSizes("gated delta", 4, 2 * 2 * 6 + 4 * 41, 4, 2, 6, 41),
    "grouped in turns": RecurrenceSizes("gated delta", 4, 2 * 2 * 6 + 4 * 41, 4, 2, 6, 41, takes_turns=True),
    "state space": RecurrenceSizes("state space", 4, 2 * 1 * 8 + 3 * 33, 3, 1, 8, 33),
    "state space of groups": RecurrenceSizes("state space", 2, 2 * 2 * 8 + 4 * 16, 4, 2, 8, 16),
}
OFFSET = 16  # of the layer's state in a request's

#: Digests of the results of all sizes, by the number of the arithmetic, variant and dtype; see test_cpu_variants.py.
DIGESTS: dict[tuple[int, str, str], str] = {
    (2, "amx", "float32"): "6b4638fc1fc1f10e",
    (2, "amx", "bfloat16"): "88202738899ef820",
    (1, "avx512bf16", "float32"): "6b4638fc1fc1f10e",
    (1, "avx512bf16", "bfloat16"): "88202738899ef820",
    (1, "avx512", "float32"): "6b4638fc1fc1f10e",
    (1, "avx512", "bfloat16"): "88202738899ef820",
    (1, "avx2", "float32"): "c6f9b74d591f8a5e",
    (1, "avx2", "bfloat16"): "88202738899ef820",
    **{(1, variant, "float32"): "11cdb0ae63ed17fc" for variant in ("neon_bf16", "neon_dot", "neon")},
    **{(1, variant, "bfloat16"): "88202738899ef820" for variant in ("neon_bf16", "neon_dot", "neon")},
    (1, "portable", "float32"): "a28f92c1b87609cb",
    (1, "portable", "bfloat16"): "320c1b7845fa2ac6",
}


@pytest.fixture(params=runnable_variants())
def library(request: pytest.FixtureRequest) -> Iterator[CpuLibrary]:
    library = load_cpu_library(request.param)
    yield library
    library.stop_threads()


def parts_of(sizes: RecurrenceSizes) -> RecurrenceParts:
    rng = np.random.Generator(np.random.PCG64(3))

    def numbers(*shape: int) -> Floats:
        return rng.standard_normal(shape, np.float32)

    kernel, bias, heads = numbers(sizes.taps, sizes.channels), numbers(sizes.channels), sizes.num_heads
    if not heads:
        return RecurrenceParts(sizes, kernel, bias)
    is_delta = sizes.kind == "gated delta"
    return RecurrenceParts(
        sizes,
        kernel,
        None if is_delta else bias,
        rates=np.abs(numbers(heads)),
        step_biases=numbers(heads),
        skips=None if is_delta else numbers(heads),
        norm=numbers(sizes.value_dim if is_delta else sizes.out_width),
        eps=1e-5,
        steps=(0.0, float("inf")) if is_delta else (0.1, 1.5),
    )


def tokens_of(sizes: RecurrenceSizes, count: int, dtype: Dtype, seed: int = 5) -> Numbers:
    rng = np.random.Generator(np.random.PCG64(seed))
    return rounded(2 * rng.standard_normal((count, sum(sizes.parts)), np.float32), dtype)


def step(layer: CpuRecurrence, states: Floats, *requests: tuple[int, int, Numbers]) -> list[Numbers]:
    """The results of requests (row of the state, first position, tokens)."""
    rows, begins, tokens = zip(*requests, strict=True)
    lengths = [len(each) for each in tokens]
    positions: Ints = np.concatenate([np.arange(b, b + n) for b, n in zip(begins, lengths, strict=True)])
    firsts: Ints = np.cumsum([0, *lengths])
    out = layer(np.concatenate(tokens), positions, StateRows(states, np.array(rows), firsts))
    return np.split(out, firsts[1:-1])


def alone(layer: CpuRecurrence, tokens: Numbers) -> tuple[Numbers, Floats]:
    """The results of one request in one step, and its state."""
    states = allocate_states(1, OFFSET + layer.sizes.state_size)
    states.fill(np.nan)
    return step(layer, states, (0, 0, tokens))[0], states[0]


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_the_kernel_computes_its_definition(name: str, dtype: Dtype, library: CpuLibrary) -> None:
    sizes = SIZES[name]
    parts, tokens = parts_of(sizes), tokens_of(sizes, 70, dtype)
    got, _ = alone(CpuRecurrence(library, parts, dtype, OFFSET), tokens)
    expected = recur(parts, to_floats(tokens), np.zeros(sizes.state_size, np.float32))
    tolerance = 2e-5 if dtype == FLOAT32 else 2**-8
    error = np.abs(to_floats(got) - expected) / (1 + np.abs(expected))
    assert error.max() < tolerance
    assert np.abs(expected).max() > 1


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_a_state_space_may_have_no_norm(dtype: Dtype, library: CpuLibrary) -> None:
    sizes = SIZES["state space"]
    parts, tokens = replace(parts_of(sizes), norm=None), tokens_of(sizes, 20, dtype)
    got, _ = alone(CpuRecurrence(library, parts, dtype, OFFSET), tokens)
    expected = recur(parts, to_floats(tokens), np.zeros(sizes.state_size, np.float32))
    error = np.abs(to_floats(got) - expected) / (1 + np.abs(expected))
    assert error.max() < (2e-5 if dtype == FLOAT32 else 2**-8)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_tokens_bits_do_not_depend_on_chunks_neighbours_and_threads(
    name: str, dtype: Dtype, num_threads: int, library: CpuLibrary
) -> None:
    """Nor do the state's. Rows are used again, by requests that begin."""
    sizes = SIZES[name]
    layer = CpuRecurrence(library, parts_of(sizes), dtype, OFFSET)
    mine, other = tokens_of(sizes, 27 + MIXED_ROWS, dtype), tokens_of(sizes, 50, dtype, seed=6)
    expected, state = alone(layer, mine)
    library.start_threads(num_threads)
    states = allocate_states(3, len(state))
    states.fill(np.nan)
    got, at = [], 0
    for turn, count in enumerate(
        (1, 13, 2, 1, 10 + MIXED_ROWS)
    ):  # the last ones and their neighbours are several tiles
        neighbours = [(0, 0, other[: 1 + 3 * turn]), (1, 0, other[:7])][: turn % 3]
        results = step(layer, states, *neighbours, (2, at, mine[at : at + count]))
        got.append(results[-1])
        at += count
    assert np.concatenate(got).tobytes() == expected.tobytes()
    size = (sizes.taps - 1) * sizes.channels
    assert states[2, OFFSET : OFFSET + size].tobytes() == state[OFFSET : OFFSET + size].tobytes()


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_states_behind_chosen_tokens_are_copied(name: str, num_threads: int, library: CpuLibrary) -> None:
    """Each is the state of a request that ends with the token, and a request goes on from it to the same bits."""
    sizes = SIZES[name]
    count = MIXED_ROWS + 12
    layer, tokens = CpuRecurrence(library, parts_of(sizes), BFLOAT16, OFFSET), tokens_of(sizes, count, BFLOAT16)
    expected, _ = alone(layer, tokens)
    library.start_threads(num_threads)
    states = allocate_states(5, OFFSET + sizes.state_size)
    states.fill(np.nan)
    places = (0, 4), (MIXED_ROWS - 2, 0), (MIXED_ROWS + 1, 2)
    saves: Ints = np.full(count, -1)
    for token, place in places:
        saves[token] = place
    rows = StateRows(states, np.array([1]), np.array([0, count]), saves)
    assert layer(tokens, np.arange(count), rows).tobytes() == expected.tobytes()
    for token, place in places:
        (rest,) = step(layer, states, (place, token + 1, tokens[token + 1 :]))
        assert rest.tobytes() == expected[token + 1 :].tobytes()
    assert np.isnan(states[3]).all()


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_the_arithmetic_is_that_of_its_number(dtype: Dtype, library: CpuLibrary) -> None:
    digest = hashlib.blake2b(digest_size=8)
    for sizes in SIZES.values():
        digest.update(alone(CpuRecurrence(library, parts_of(sizes), dtype, OFFSET), tokens_of(sizes, 30, dtype))[0])
    name = "float32" if dtype == FLOAT32 else "bfloat16"
    assert digest.hexdigest() == DIGESTS[arithmetic_of(library.variant), library.variant, name]


def test_every_variant_has_its_digests() -> None:
    assert {(arithmetic_of(variant), variant, name) for variant in VARIANTS for name in ("float32", "bfloat16")} == set(
        DIGESTS
    )


def test_numbers_that_are_not_finite_stay_in_their_request(library: CpuLibrary) -> None:
    sizes = SIZES["gated delta"]
    layer, mine = CpuRecurrence(library, parts_of(sizes), FLOAT32, OFFSET), tokens_of(SIZES["gated delta"], 9, FLOAT32)
    expected, _ = alone(layer, mine)
    poisoned = np.full_like(mine, np.nan)
    states = allocate_states(2, OFFSET + sizes.state_size)
    first, second = step(layer, states, (0, 0, poisoned), (1, 0, mine))
    assert np.isnan(first).any(1).all()
    assert second.tobytes() == expected.tobytes()
    assert step(layer, states, (0, 0, mine))[0].tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_output_gates_are_sigmoids(dtype: Dtype, library: CpuLibrary) -> None:
    rng = np.random.default_rng(4)
    x, gates = (rounded(4 * rng.standard_normal((5, 37)).astype(np.float32), dtype) for _ in range(2))
    expected = to_floats(x).astype(np.float64) / (1 + np.exp(-to_floats(gates).astype(np.float64)))
    open_gates(library, x, gates)
    np.testing.assert_allclose(to_floats(x), expected, rtol=1e-6 if dtype == FLOAT32 else 2**-8)
