"""Gumbel noise: its bits are Philox's as defined, its numbers are those of Python's logarithm, and its distribution is
Gumbel's."""

import math

import numpy as np
import pytest

from kernels.gumbel import HIGH_BITS, LOW_BITS, gumbel, high_bits, ln, noise, noise_bounds, philox4x32

LEAST, MOST = noise_bounds()
SEEDS = np.array([0, 7, 2**64 - 1], np.uint64)
POSITIONS, CHOICES = np.array([0, 5, 2**31 - 1]), np.array([0, 3, 2**16])


def word(row: int, purpose: int, lane: int, index: int) -> int:
    counter = np.array([[POSITIONS[row], CHOICES[row], purpose, lane]], np.uint32)
    return int(philox4x32(SEEDS[row : row + 1], counter)[0, index])


@pytest.mark.parametrize("token", [0, 1, 6, 7, 8, 49_151, 262_143])
def test_the_bits_are_those_of_the_definition(token: int) -> None:
    for row in range(3):
        half = token % 8
        high = word(row, HIGH_BITS, token // 8, half // 2) >> 16 * (half % 2) & 0xFFFF
        low = word(row, LOW_BITS, token // 4, token % 4)
        v = ((high << 32) + low + 0.5) / 2**48
        expected = -math.log(-math.log1p(-v))
        columns = SEEDS[row : row + 1], POSITIONS[row : row + 1], CHOICES[row : row + 1]
        assert high_bits(*columns, token + 3)[0, token] == high
        assert noise(*columns, np.array([[token]]))[0, 0] == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert LEAST[high] < noise(*columns, np.array([[token]]))[0, 0] < MOST[high]


def test_the_logarithm() -> None:
    x = np.concatenate([np.geomspace(1e-15, 40, 1000), 1 - np.geomspace(2**-49, 0.5, 1000)])
    expected = np.array([math.log(value) for value in x.tolist()])
    assert np.abs(ln(x) / expected - 1).max() < 1e-11


def test_extreme_bits_are_finite() -> None:
    found = gumbel(np.array([0, 0xFFFF]), np.array([0, 2**32 - 1]))
    assert 33.9 < found[0] < 34
    assert -3.6 < found[1] < -3.5


def test_the_noise_falls_as_its_bits_rise() -> None:
    found = gumbel(np.arange(1 << 16), np.zeros(1 << 16))
    assert (np.diff(found) < 0).all()
    assert (found > LEAST).all()
    assert (found < MOST).all()


def test_the_distribution_is_gumbels() -> None:
    """Kolmogorov-Smirnov, and no correlation between tokens, positions, choices or seeds."""
    count = 200_000
    found = noise(np.array([12], np.uint64), np.array([3]), np.array([1]), np.arange(count)[None])[0]
    cumulative = np.exp(-np.exp(-np.sort(found)))
    steps = np.arange(count + 1) / count
    distance = max(np.abs(cumulative - steps[:-1]).max(), np.abs(cumulative - steps[1:]).max())
    assert distance < 1.95 / math.sqrt(count)  # one sample in a thousand is farther; the seed is fixed
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 4 / math.sqrt(count)
    tokens = np.arange(50_000)[None].repeat(4, 0)
    rows = noise(np.array([1, 1, 1, 2], np.uint64), np.array([0, 0, 1, 0]), np.array([0, 1, 0, 0]), tokens)
    assert np.abs(np.corrcoef(rows) - np.eye(4)).max() < 5 / math.sqrt(50_000)
