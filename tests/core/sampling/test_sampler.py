"""The sampler against a sort-based reference, its distribution, and its independence of neighbours."""

import itertools

import numpy as np
import pytest

from core.sampling import sampler
from core.sampling.edit_group import Forbidden
from core.sampling.sampler import NOT_A_TOKEN, SamplingInputs
from kernels.cpu.library import load_cpu_library
from kernels.cpu.sampling import CpuSampler
from kernels.gumbel import noise


@pytest.fixture(scope="module")
def c_kernel():
    return CpuSampler(load_cpu_library())


@pytest.fixture(params=["c", "numpy"], autouse=True)
def kernel(request, monkeypatch, c_kernel):
    """Every test once with the C kernel, once with NumPy."""
    monkeypatch.setitem(KERNEL, "", c_kernel if request.param == "c" else None)


KERNEL = {"": None}


def sample(logits, columns):
    return sampler.sample(logits, columns, KERNEL[""])


def inputs(
    num_rows, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=None, position=None, choice=0, forbidden=()
):
    rows, tokens = zip(*forbidden, strict=True) if forbidden else ((), ())
    edits = (Forbidden(np.array(rows, np.int64), np.array(tokens, np.int64)),)
    return SamplingInputs(
        temperature=np.broadcast_to(np.float32(temperature), num_rows).copy(),
        top_k=np.broadcast_to(np.int64(top_k), num_rows).copy(),
        top_p=np.broadcast_to(np.float32(top_p), num_rows).copy(),
        min_p=np.broadcast_to(np.float32(min_p), num_rows).copy(),
        seed=np.arange(num_rows, dtype=np.uint64) if seed is None else np.asarray(seed, np.uint64),
        position=np.zeros(num_rows, np.int64) if position is None else np.asarray(position, np.int64),
        choice=np.broadcast_to(np.int64(choice), num_rows).copy(),
        edits=edits,
    )


def take(columns, rows):
    """The inputs of some rows; columns must have no edits."""
    return SamplingInputs(*(column[rows] for column in columns[:7]))


def reference(logits, columns, row):
    """One row, plainly."""
    if columns.temperature[row] == 0:
        return int(np.argmax(edited(logits, columns, row)))
    order, _, scaled = left_by_filters(edited(logits, columns, row), columns, row)
    columns_of_row = (columns.seed, columns.position, columns.choice)
    sums = scaled[order] + noise(*(column[row : row + 1] for column in columns_of_row), order[None])[0]
    return int(order[sums == sums.max()].min())


def edited(logits, columns, row):
    logits = logits[row].astype(np.float32)
    for forbidden_row, token in zip(*columns.edits[0], strict=True):
        if forbidden_row == row and token < len(logits):
            logits[token] = -np.inf
    return logits


def left_by_filters(logits, columns, row):
    """(tokens left, in the order of a draw; weights; scaled logits) of one row: sort everything, then apply each
    filter as its definition says."""
    scaled = logits / columns.temperature[row]
    weights = np.exp((scaled - scaled.max()).astype(np.float64))
    keep = weights >= columns.min_p[row]
    top_k, top_p = int(columns.top_k[row]), float(columns.top_p[row])
    if top_k >= len(scaled):
        top_k = 0
    if top_k:
        masked = np.where(keep, scaled, -np.inf)
        keep &= masked >= np.sort(masked)[::-1][top_k - 1]
    order = np.lexsort((np.arange(len(scaled)), -scaled)) if top_k or top_p < 1 else np.arange(len(scaled))
    order = order[keep[order]]
    if top_p < 1:
        cumulative = np.cumsum(weights[order])
        order = order[cumulative - weights[order] < top_p * cumulative[-1]]
    return order, weights, scaled


CASES = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 64},
    {"top_k": 300, "temperature": 5.0},
    {"top_k": 5000},
    {"top_k": 10**9},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_p": 0.999, "temperature": 3.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 1.0, "top_k": 7},
    {"min_p": 0.02, "top_p": 0.95},
    {"min_p": 0.3, "top_k": 40},
    {"top_k": 200, "top_p": 0.5, "temperature": 2.0},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.05, "temperature": 0.7},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("vocab_size", [50, 6000])
def test_token_equals_sort_based_reference(case, vocab_size):
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(0, 2.5, (40, vocab_size)).astype(np.float32)
    columns = inputs(40, position=np.arange(40) * 7, forbidden=[(3, 5), (3, 1), (9, 0), (9, vocab_size + 3)], **case)
    got = sample(logits.copy(), columns)
    assert got.dtype == np.int32
    assert got.tolist() == [reference(logits, columns, row) for row in range(40)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_token_equals_reference_with_many_ties(case):
    """Few distinct logits: ties at the top_k threshold, at the top_p boundary and at the end of every bucket."""
    rng = np.random.default_rng(0)
    logits = rng.integers(-3, 3, (24, 5000)).astype(np.float32)
    logits[:8] = 1.0
    columns = inputs(24, **case)
    got = sample(logits.copy(), columns)
    assert got.tolist() == [reference(logits, columns, row) for row in range(24)]


def test_row_alone_equals_row_among_others():
    rng = np.random.default_rng(1)
    logits = (rng.normal(0, 1, (len(CASES), 40_000)) * rng.uniform(0.1, 6, (len(CASES), 1))).astype(np.float32)
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    values = {name: np.array([{**full, **case}[name] for case in CASES]) for name in full}
    columns = inputs(len(CASES), seed=rng.integers(0, 2**63, len(CASES)), **values)
    together = sample(logits.copy(), columns)
    for row in range(len(CASES)):
        alone = sample(logits[row : row + 1].copy(), take(columns, slice(row, row + 1)))
        assert alone[0] == together[row], CASES[row]
    backwards = np.arange(len(CASES))[::-1].copy()
    assert (sample(logits[backwards], take(columns, backwards)) == together[backwards]).all()


def test_totals_do_not_depend_on_rows():
    from core.sampling.filters import weights_above_min_p

    scaled = np.random.default_rng(0).standard_normal((5, 200_000), np.float32)

    def totals(rows):
        return weights_above_min_p(scaled[rows], scaled[rows].max(-1, keepdims=True), np.zeros(len(rows))).sum(-1)

    assert [totals([row])[0] for row in range(5)] == totals(range(5)).tolist() == totals([4, 3, 2, 1, 0])[::-1].tolist()


@pytest.mark.parametrize("case", [{}, {"top_k": 6}, {"top_p": 0.7}, {"min_p": 0.2}, {"temperature": 2.0}], ids=str)
def test_distribution_chi_square(case):
    num_draws, vocab_size = 20_000, 12
    logits = np.linspace(-2, 1.5, vocab_size, dtype=np.float32)[np.random.default_rng(3).permutation(vocab_size)]
    columns = inputs(num_draws, seed=np.full(num_draws, 12345), position=np.arange(num_draws), **case)
    drawn = sample(np.tile(logits, (num_draws, 1)), columns)
    weights = np.exp(logits.astype(np.float64) / case.get("temperature", 1.0))
    weights[weights < case.get("min_p", 0.0) * weights.max()] = 0
    order = np.argsort(-weights)
    weights[order[case.get("top_k", vocab_size) :]] = 0
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= case.get("top_p", 1.0) * weights.sum()]] = 0
    expected = num_draws * weights / weights.sum()
    counts = np.bincount(drawn, minlength=vocab_size)
    allowed = expected > 0
    assert counts[~allowed].sum() == 0
    statistic = ((counts - expected)[allowed] ** 2 / expected[allowed]).sum()
    freedom = allowed.sum() - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 4  # about four standard deviations; the seed is fixed


def test_positions_seeds_and_choices_give_independent_draws():
    logits = np.zeros((1000, 97), np.float32)
    by_choice = sample(logits.copy(), inputs(1000, seed=np.zeros(1000), choice=np.arange(1000)))
    by_position = sample(logits.copy(), inputs(1000, seed=np.zeros(1000), position=np.arange(1000)))
    by_seed = sample(logits.copy(), inputs(1000, seed=np.arange(1000), position=np.zeros(1000)))
    for drawn, other in itertools.permutations((by_position, by_seed, by_choice), 2):
        assert len(np.unique(drawn)) == 97
        assert np.mean(drawn == other) < 0.05
        assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.1


def test_greedy_takes_the_lowest_of_equal_maxima():
    logits = np.zeros((2, 50_000), np.float32)
    logits[0, [777, 40_000]] = 3.0
    assert sample(logits, inputs(2, temperature=0.0)).tolist() == [777, 0]


def test_greedy_without_its_forbidden_tokens():
    logits = np.array([[1.0, 5.0, 3.0, 4.0], [1.0, 5.0, 3.0, 4.0]], np.float32)
    assert sample(logits, inputs(2, temperature=0.0, forbidden=[(0, 1), (0, 3), (0, 1)])).tolist() == [2, 1]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_that_are_not_finite_are_reported(case):
    logits = np.random.default_rng(0).standard_normal((5, 300), np.float32)
    logits[1, 7] = np.nan
    logits[2] = -np.inf
    logits[4, 0] = np.inf
    columns = inputs(5, **case)
    clean = reference(logits, columns, 0), reference(logits, columns, 3)
    assert sample(logits, columns).tolist() == [clean[0], NOT_A_TOKEN, NOT_A_TOKEN, clean[1], NOT_A_TOKEN]


def test_all_tokens_forbidden_is_reported():
    columns = inputs(1, forbidden=[(0, token) for token in range(4)])
    assert sample(np.zeros((1, 4), np.float32), columns).tolist() == [NOT_A_TOKEN]


def test_no_rows():
    assert sample(np.zeros((0, 10), np.float32), inputs(0)).shape == (0,)
