"""Rows whose largest logit is known before edits draw what they draw when it is searched after them."""

import numpy as np
import pytest

from core.sampling.allowed_tokens import OnlyThese
from core.sampling.edit_group import Edit, Forbidden
from core.sampling.logit_bias import Biased
from core.sampling.logit_edits import apply_edits, largest_after
from core.sampling.penalties import Penalized
from core.sampling.sampler import SamplingInputs, sample, sample_greedily
from core.sampling.structured_outputs import Masked
from kernels.cpu.build import usable_variants
from kernels.cpu.library import load_cpu_library
from kernels.cpu.sampling import UNKNOWN, CpuSampler

ROWS, SIZE = 48, 203


@pytest.fixture(scope="module", params=usable_variants())
def sampler(request):
    library = load_cpu_library(request.param)
    return CpuSampler(library)


def some_edits(rng: np.random.Generator, logits: np.ndarray) -> tuple[Edit, ...]:
    """Edits of some rows each; most keep the row's largest logit."""
    masks = rng.integers(0, 2**32, (12, -(-SIZE // 32) - 1), np.uint32)  # of fewer tokens than the model has
    masks[:9] = 2**32 - 1
    likeliest = logits.argmax(-1)
    forbidden = np.append(likeliest[12:15], rng.integers(0, SIZE, 9))
    rows = np.arange(24, 30)
    ones = np.ones(6, np.float32)
    return (
        Masked(np.arange(12), masks),
        Forbidden(np.arange(12, 24), forbidden),
        OnlyThese(np.repeat(rows, 2), rng.permutation(SIZE)[:12]),
        Biased(np.arange(30, 36), rng.permutation(SIZE)[:6], 9 * ones),
        Penalized(np.arange(36, 42), likeliest[36:42], np.ones(6, np.int64), 2 * ones, ones, 0 * ones),
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_draws_are_those_of_a_search(temperature, sampler):
    num_known = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        logits = rng.integers(-9, 9, (ROWS, SIZE)).astype(np.float32)  # ties: the first of equals counts
        logits[2, 5], logits[13, 7], logits[26, 4], logits[44, 9] = np.nan, np.inf, np.nan, np.nan
        edits = some_edits(rng, np.nan_to_num(logits))
        temperatures = np.where(np.arange(ROWS) % 2, temperature, 0).astype(np.float32)
        filters = temperatures, np.zeros(ROWS, np.int64), np.ones(ROWS, np.float32), np.zeros(ROWS, np.float32)
        stream = rng.integers(0, 2**64, ROWS, np.uint64), rng.integers(0, 99, ROWS), np.zeros(ROWS, np.int64)
        inputs = SamplingInputs(*filters, *stream, edits)
        largest = sample_greedily(logits, sampler)
        got = sample(logits.copy(), inputs, sampler, largest)
        assert np.array_equal(got, sample(logits.copy(), inputs, sampler)), seed
        assert np.array_equal(got, sample(logits.copy(), inputs)), seed
        unread = logits.copy()
        assert np.array_equal(got, sample(unread, inputs, sampler, largest, keeps_logits=False)), seed
        assert np.array_equal(got, sample(logits.copy(), inputs, None, largest, keeps_logits=False)), seed
        known = largest_after(largest, edits)
        skipped = (known >= 0) & (temperatures == 0)
        assert np.array_equal(unread[skipped], logits[skipped]), "rows whose token is known are not edited"
        edited = logits.copy()
        apply_edits(edited, edits)
        assert np.array_equal(unread[~skipped], edited[~skipped], equal_nan=True)
        num_known += np.count_nonzero(known != UNKNOWN)
    assert ROWS * 20 // 3 < num_known < ROWS * 20, num_known


def test_greedy_rows_whose_tokens_are_all_known_are_neither_edited_nor_searched(sampler):
    logits = np.random.default_rng(0).standard_normal((ROWS, SIZE)).astype(np.float32)
    largest = sample_greedily(logits, sampler)
    masks = np.zeros((ROWS, -(-SIZE // 32)), np.uint32)
    masks[np.arange(ROWS), largest >> 5] = 1 << (largest & 31)
    edits = (Masked(np.arange(ROWS), masks, sampler.token_masks),)
    columns = *(np.zeros(ROWS, to) for to in (np.float32, np.int64)), np.ones(ROWS, np.float32)
    stream = np.zeros(ROWS, np.float32), np.zeros(ROWS, np.uint64), *[np.zeros(ROWS, np.int64)] * 2
    inputs, before = SamplingInputs(*columns, *stream, edits), logits.copy()
    assert np.array_equal(sample(logits, inputs, None, largest, keeps_logits=False), largest)
    assert np.array_equal(logits, before)
    assert np.array_equal(sample(logits, inputs, sampler, largest), largest)
    assert np.array_equal(np.isinf(logits).sum(1), np.full(ROWS, SIZE - 1))
