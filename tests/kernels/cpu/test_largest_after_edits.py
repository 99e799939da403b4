"""Rows whose largest logit is known before edits draw what they draw when it is searched after them."""

import numpy as np
import pytest

from core.sampling.allowed_tokens import OnlyThese
from core.sampling.edit_group import Edit, Forbidden
from core.sampling.logit_bias import Biased
from core.sampling.logit_edits import largest_after
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
        num_known += np.count_nonzero(largest_after(largest, edits) != UNKNOWN)
    assert ROWS * 20 // 3 < num_known < ROWS * 20, num_known
