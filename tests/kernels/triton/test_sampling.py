"""The Triton sampler draws what core/sampling/sampler.py draws, and its noise is kernels/gumbel.py's, bit for bit."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from core.sampling.sampler import SamplingInputs, sample
from kernels.gumbel import noise
from kernels.triton import gumbel, sampling, threshold_search
from kernels.triton.sampling import kinds_of, pack_columns, sample_tokens
from tests.triton_device import ANYWHERE, DEVICE, GPU_ONLY

pytestmark = ANYWHERE

VOCAB = 90


@triton.jit
def _noise(seeds, positions, choices, out, FIRST: tl.constexpr, N: tl.constexpr):
    row = tl.program_id(0)
    seed, position, choice = tl.load(seeds + row), tl.load(positions + row), tl.load(choices + row)
    numbers = gumbel.noise_from(seed, position, choice, FIRST, N)
    tl.store(out + row * N + tl.arange(0, N), numbers)


def test_noise_is_that_of_numpy() -> None:
    rng = np.random.default_rng(0)
    seeds = np.concatenate((np.array([0, 1, 2**63, 2**64 - 1], np.uint64), rng.integers(0, 2**64, 4, np.uint64)))
    positions = np.concatenate((np.array([0, 2**31 - 1], np.int32), rng.integers(0, 2**31, 6).astype(np.int32)))
    choices = np.arange(8, dtype=np.int32)
    out = torch.empty((8, 1024), dtype=torch.float64, device=DEVICE)
    columns = (torch.from_numpy(x).to(DEVICE) for x in (seeds.view(np.int64), positions, choices))
    _noise[(8,)](*columns, out, FIRST=48_128, N=1024)
    expected = noise(seeds, positions, choices, np.arange(48_128, 49_152)[None].repeat(8, 0))
    assert np.array_equal(out.cpu().numpy().view(np.int64), expected.view(np.int64))


class Row(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


ROWS = (
    Row(0.0),
    Row(),
    Row(0.3),
    Row(top_k=1),
    Row(1.7, top_k=7),
    Row(top_k=VOCAB),
    Row(1.5, top_p=0.8),
    Row(2.0, top_p=0.01),
    Row(1.2, top_k=20, top_p=0.7),
    Row(min_p=0.2),
    Row(1.5, top_k=5, min_p=0.9),
    Row(1.5, top_p=0.9, min_p=0.1),
)


def columns(rows: tuple[Row, ...], seed: int = 0) -> SamplingInputs:
    temperature, top_k, top_p, min_p = (np.array(column) for column in zip(*rows, strict=True))
    rng, count = np.random.default_rng(seed), len(rows)
    return SamplingInputs(
        temperature.astype(np.float32),
        top_k.astype(np.int64),
        top_p.astype(np.float32),
        min_p.astype(np.float32),
        rng.integers(0, 2**64, count, np.uint64),
        rng.integers(0, 1000, count),
        rng.integers(0, 4, count),
    )


def draw(logits: torch.Tensor, inputs: SamplingInputs) -> list[int]:
    parameters = {name: column for name, column in inputs._asdict().items() if name != "edits"}
    words = pack_columns(**parameters)
    return sample_tokens(logits.to(DEVICE), torch.from_numpy(words).to(DEVICE), kinds_of(words)).tolist()


@pytest.mark.parametrize("kind", ["spread", "tied", "forbidden"])
def test_draws_equal_those_of_the_sampler(kind: str) -> None:
    generator = torch.Generator().manual_seed(len(kind))
    logits = torch.randn((len(ROWS), VOCAB), generator=generator) * 2
    if kind == "tied":
        logits = logits.round()
    if kind == "forbidden":
        logits[:, 4:] = -torch.inf
    inputs = columns(ROWS)
    assert draw(logits, inputs) == sample(logits.numpy().copy(), inputs).tolist()


@pytest.mark.parametrize("kind", [pytest.param("usual", marks=pytest.mark.soak), "flat", "tied"])
def test_short_lists_and_whole_rows_leave_the_same_tokens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With lists of two groups at most, most rows are searched as a whole."""
    logits = torch.randn((len(ROWS), 700), generator=torch.Generator().manual_seed(4)) * (0.1 if kind == "flat" else 3)
    if kind == "tied":
        logits = logits.round()
    inputs = columns(ROWS, seed=5)
    expected = draw(logits, inputs)
    monkeypatch.setattr(threshold_search, "MOST_GROUPS", 2)
    monkeypatch.setattr(threshold_search, "SOME_GROUPS", 1)
    assert draw(logits, inputs) == expected
    assert expected == sample(logits.numpy().copy(), inputs).tolist()


@pytest.mark.parametrize(("rows", "vocab_size"), [(2, 10_001), pytest.param(24, 128_256, marks=GPU_ONLY)])
def test_rows_of_several_pieces(rows: int, vocab_size: int) -> None:
    """Weights differ in their last bits from those of the other sampler: a token at a border may stay or go."""
    logits = torch.randn((rows * len(ROWS), vocab_size), generator=torch.Generator().manual_seed(3)) * 3
    inputs = columns(ROWS * rows)
    got, expected = draw(logits, inputs), sample(logits.numpy().copy(), inputs).tolist()
    alike = sum(mine == theirs for mine, theirs in zip(got, expected, strict=True))
    assert alike >= 0.99 * len(expected), (got, expected)


def test_in_blocks_smaller_than_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MAX_BLOCK", 32)
    logits = torch.randn((5, VOCAB), generator=torch.Generator().manual_seed(1)).round()
    inputs = columns((Row(0.0), Row(), Row(top_k=9), Row(top_p=0.6), Row(3.0)))
    assert draw(logits, inputs) == sample(logits.numpy().copy(), inputs).tolist()


@pytest.mark.parametrize("count", [8, pytest.param(16, marks=pytest.mark.soak)])
def test_every_token_is_drawn_as_often_as_it_should(count: int) -> None:
    """Ties at the border of top_p, over many positions: the same draws as the other sampler's."""
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, 1.0]]).repeat(count, 1)
    inputs = columns((Row(1.0, 0, 0.6),) * count)
    got = draw(logits, inputs)
    assert got == sample(logits.numpy().copy(), inputs).tolist()
    assert set(got) == {1, 2, 4}


def test_rows_that_are_no_numbers() -> None:
    logits = torch.zeros((5, VOCAB))
    logits[0, 3] = torch.nan
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    logits[3, 3] = -torch.nan
    rows = (Row(0.0), Row(), Row(top_p=0.5), Row(top_k=3), Row(0.0))
    assert draw(logits, columns(rows)) == [-1, -1, -1, -1, 0]
    assert draw(logits[:0], columns(rows)._replace(**{name: np.zeros(0) for name in SamplingInputs._fields[:7]})) == []


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = torch.randn((4, VOCAB), generator=torch.Generator().manual_seed(2))
    inputs = columns((Row(1.3, top_p=0.9), Row(), Row(0.0), Row(1.1, top_k=30)))
    whole = draw(logits, inputs)
    for index in range(4):
        alone = SamplingInputs(*(column[[index]] for column in inputs[:7]))
        assert draw(logits[[index]], alone) == [whole[index]]
