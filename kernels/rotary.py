"""Frequencies of rotary embedding [D / 2] float32, in radians per token, and their scalings for longer contexts.

The operations and their order are those of the published models' own code. An angle is a frequency times a position, so
a frequency's last bit matters. Powers are computed in float64 and rounded once: torch's float32 powers depend on the
CPU model, and so do NumPy's.
"""

import math
from collections.abc import Sequence

import numpy as np

from kernels.arrays import Floats, Ints


def rotary_frequencies(head_dim: int, theta: float) -> Floats:
    """Return the frequencies [head_dim / 2] of a head, without scaling."""
    return np.float32(1) / _wavelengths(head_dim, theta)


def rotary_tables(positions: Ints, frequencies: Floats, factor: float = 1.0) -> tuple[Floats, Floats]:
    """Return the cosines and sines [T, head_dim] of these positions [T], times factor.

    sin includes the sign of its half: (-sin, +sin). A pair with the frequency 0 is not rotated: its cosine is 1.
    """
    angles = positions[:, None].astype(np.float32) * frequencies
    # In float64, rounded once: in float32 the last bit would depend on the CPU model.
    angles = angles.astype(np.float64)
    factors = np.where(frequencies == 0, np.float32(1), np.float32(factor))
    cos, sin = (factors * part(angles).astype(np.float32) for part in (np.cos, np.sin))
    return np.concatenate((cos, cos), -1), np.concatenate((-sin, sin), -1)


def query_factors(positions: Ints, growth: float, length: float) -> Floats:
    """Return the factors [T] for queries at these positions [T], which grow every `length` tokens (Llama 4)."""
    factors: Floats = (1 + growth * np.log1p(np.floor(positions / length))).astype(np.float32)
    return factors


def linear(frequencies: Floats, factor: float) -> Floats:
    """Divide all frequencies by the factor."""
    return frequencies / np.float32(factor)


def llama3(
    frequencies: Floats, factor: float, low_freq_factor: float, high_freq_factor: float, original_length: float
) -> Floats:
    """Stretch long wavelengths and keep short ones.

    Wavelengths above original_length / low_freq_factor are stretched. Those below original_length / high_freq_factor
    are kept. Between the two, if they differ, they get a weighted mean.
    """
    one = np.float32(1)
    wavelengths = one / frequencies * np.float32(2 * math.pi)  # torch divides a number by a tensor like this
    low, high = original_length / low_freq_factor, original_length / high_freq_factor
    turns = one / wavelengths * np.float32(original_length)
    smooth = (turns - np.float32(low_freq_factor)) / np.float32(high_freq_factor - low_freq_factor or 1.0)
    stretched = frequencies / np.float32(factor)
    between = (one - smooth) * frequencies / np.float32(factor) + smooth * frequencies
    scaled: Floats = np.where(wavelengths > low, stretched, np.where(wavelengths < high, frequencies, between))
    return scaled


def yarn(
    head_dim: int,
    theta: float,
    factor: float,
    original_length: float,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> Floats:
    """Return the frequencies [head_dim / 2] of YaRN, computed from theta.

    Dimensions with more than beta_fast rotations within original_length are kept. Those with fewer than beta_slow are
    stretched. Between the two, the transition is linear.
    """

    def dimension(rotations: float) -> float:
        return (head_dim * math.log(original_length / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
    wavelengths, one = _wavelengths(head_dim, theta), np.float32(1)
    kept, stretched = one / wavelengths, one / (np.float32(factor) * wavelengths)
    share = one - ramp
    scaled: Floats = stretched * (one - share) + kept * share
    return scaled


def longrope(head_dim: int, theta: float, divisors: Sequence[float]) -> Floats:
    """Return the frequencies [head_dim / 2] of LongRoPE, each with its own divisor [head_dim / 2]."""
    scaled: Floats = np.float32(1) / (np.array(divisors, np.float32) * _wavelengths(head_dim, theta))
    return scaled


def _wavelengths(head_dim: int, theta: float) -> Floats:
    """Return theta ** (2 i / head_dim) [head_dim / 2]: tokens per radian."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.array([theta**exponent for exponent in exponents.tolist()], np.float32)
