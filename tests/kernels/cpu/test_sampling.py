"""The C sampler where its own parts show: every variant draws NumPy's tokens, bit for bit, and neither threads nor
neighbours change one. tests/core/sampling/test_sampler.py tests what it draws, beside torch's
operations."""

import functools

import numpy as np
import pytest
import torch

from core.sampling.sampler import SamplingInputs, sample, sample_greedily
from kernels.cpu.build import usable_variants
from kernels.cpu.library import load_cpu_library
from tests.kernels.on_tensors import CpuSampler

ROWS = 200


@pytest.fixture(scope="module", params=usable_variants())
def library(request):
    return load_cpu_library(request.param)


def columns(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    rng = np.random.default_rng(0)
    filters = (np.full(ROWS, value) for value in (temperature, top_k, top_p, min_p))
    seeds = rng.integers(0, 2**64, ROWS, np.uint64)
    return (*filters, seeds, rng.integers(0, 2**31, ROWS), rng.integers(0, 100, ROWS))


def some_logits(size, scale):
    logits = torch.randn(ROWS, size, generator=torch.Generator().manual_seed(size)) * scale
    logits[3, 1:] = logits[4, : size - 1] = -torch.inf
    return logits


@pytest.mark.parametrize("scale", [0.0, 0.5, 4.0, 40.0])
@pytest.mark.parametrize("size", [1, 77, 128, 5003])
@pytest.mark.parametrize(
    "filters", [{}, {"temperature": 0.7}, {"top_k": 3}, {"temperature": 9.0, "min_p": 0.5}], ids=str
)
def test_draws_are_those_of_numpy(filters, size, scale, library):
    """The sums of logits and noise have NumPy's bits: of equal logits the noise alone decides."""
    logits = some_logits(size, scale)
    drawn = CpuSampler(library)(logits, columns(**filters))
    assert np.array_equal(drawn, drawn_by_numpy(tuple(filters.items()), size, scale))


@functools.cache  # of all variants
def drawn_by_numpy(filters, size, scale):
    temperature, top_k, top_p, min_p, *stream = columns(**dict(filters))
    types = temperature.astype(np.float32), top_k.astype(np.int64), top_p.astype(np.float32), min_p.astype(np.float32)
    return sample(some_logits(size, scale).numpy(), SamplingInputs(*types, *stream))


@pytest.mark.parametrize(
    "filters",
    [{}, {"temperature": 0.0}, {"top_k": 50}, {"top_k": 3000}, {"top_p": 0.9}, {"top_p": 0.3, "min_p": 0.01}],
    ids=str,
)
def test_neither_threads_nor_neighbours_change_a_token(filters, library):
    logits = torch.randn(ROWS, 5003, generator=torch.Generator().manual_seed(0)) * 4
    given = columns(**filters)
    sampler = CpuSampler(library)
    usual = sampler(logits, given)
    for num_threads in (1, 2, 3):
        library.start_threads(num_threads)
        backwards = tuple(column[::-1] for column in given)
        assert np.array_equal(sampler(logits.flip(0), backwards)[::-1], usual)
        alone = [
            sampler(logits[row : row + 1], tuple(column[row : row + 1] for column in given))[0] for row in range(9)
        ]
        assert np.array_equal(alone, usual[:9])
    library.stop_threads()


def test_rows_without_a_number_are_reported(library):
    logits = torch.zeros(ROWS, 77)
    logits[0, 70], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, :76] = -torch.inf
    for filters in ({}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.5}):
        drawn = CpuSampler(library)(logits, columns(**filters))
        assert drawn[:4].tolist() == [-1, -1, -1, 76]
        assert (drawn[4:] >= 0).all()


@pytest.mark.parametrize("size", [1, 77, 512, 5003])
def test_largest_is_a_draw_at_temperature_0(size, library):
    generator = torch.Generator().manual_seed(size)
    logits = torch.randint(-50, 50, (ROWS, size), generator=generator).float()  # ties: the first counts
    logits[0, size // 2], logits[1, size - 1], logits[2] = torch.nan, torch.inf, -torch.inf
    sampler = CpuSampler(library)
    got = sampler.largest(logits)
    assert got[:3].tolist() == [-1, -1, -1]
    assert np.array_equal(got[3:], logits[3:].argmax(-1))
    drawn = sampler(logits, columns())  # has parameters
    assert np.array_equal(sampler.largest(logits), got)
    assert np.array_equal(sampler(logits, columns(temperature=0.0)), got)
    assert np.array_equal(sampler(logits, columns()), drawn)
    assert np.array_equal(sample_greedily(logits.numpy()), got)


@pytest.mark.parametrize("top_k", [1, 10])
def test_logits_that_the_temperature_makes_equal_are_ties(top_k, library):
    """Ties occur at the last of top_k tokens too: divided by 3, some neighbouring float32 numbers become equal."""
    high = np.arange(1, 2, 1e-3, np.float32)
    low = np.nextafter(high, np.float32(0))
    index = int(np.flatnonzero(high / np.float32(3) == low / np.float32(3))[0])
    logits = torch.full((ROWS, 200), -5.0)
    logits[:, 130 : 130 + top_k] = float(high[index])
    logits[:, 7] = float(low[index])
    drawn = CpuSampler(library)(logits, columns(temperature=3.0, top_k=top_k))
    assert set(drawn.tolist()) == {7, *range(130, 130 + top_k)}


@pytest.mark.parametrize("size", [200, 5003, pytest.param(49_152, marks=pytest.mark.soak)])
def test_of_equal_logits_all_remain(size, library):
    """top_k keeps the ties of the last token that it keeps, as transformers' TopKLogitsWarper and vLLM do. So equal
    logits are drawn as without it, and top_p keeps the lower ids; -0 equals 0."""
    logits = torch.zeros(ROWS, size)
    logits[:, 1::3] = -0.0
    sampler, given = CpuSampler(library), columns()
    usual = sampler(logits, given)
    assert len(set(usual.tolist())) > 100
    assert np.array_equal(sampler(logits, columns(top_k=50)), usual)
    kept = sampler(logits, columns(top_p=0.5))
    assert kept.max() < np.ceil(size / 2)
    assert np.array_equal(kept[usual < size // 2], usual[usual < size // 2])
    logits[:, 2::5] = 1.0
    assert set((sampler(logits, columns(top_k=20)) % 5).tolist()) == {2}
    assert np.array_equal(sampler(logits, columns(top_k=size // 5 + 20)), sampler(logits, given))


@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_many_candidates_are_in_order(scale, library):
    """top_p keeps the most likely tokens, whatever way the candidates are sorted."""
    logits = torch.randn(ROWS, 5003, generator=torch.Generator().manual_seed(2)) * scale
    logits[:, ::7] = logits[:, 1::7][:, : logits[:, ::7].shape[1]]  # pairs of equals
    drawn = CpuSampler(library)(logits, columns(top_p=0.9))
    chances = torch.softmax(logits.double(), -1)
    for row, token in enumerate(drawn.tolist()):
        own = logits[row, token]
        before = chances[row][(logits[row] > own) | ((logits[row] == own) & (torch.arange(5003) < token))].sum()
        assert before < 0.9 + 1e-6
