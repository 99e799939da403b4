"""Gumbel noise: one number per token, used to draw a token from a row of logits.

The token with the largest logit + noise is a draw from softmax(logits) if the noise is independent and has the
distribution function exp(-exp(-x)): Gumbel-max, also known as the exponential race. The noise is a function of (seed,
position, choice, token id), not of logits. So two models that draw at one position with one seed have the same noise,
and draw the same token about as often as their distributions allow.

This is also the definition for kernels/cpu/c/sampling/gumbel.h and kernels/triton/gumbel.py. Each operation is rounded
separately, so that all give the same bits:

    high  = 16 bits of Philox(seed; position, choice, HIGH_BITS, token // 8): half token % 8, low halves first
    low   = 32 bits of Philox(seed; position, choice, LOW_BITS, token // 4): word token % 4
    v     = (high * 2**32 + low + 0.5) * 2**-48, float64
    noise = -ln(-ln(1 - v)), from -3.6 to 34; see ln()
"""

import functools

import numpy as np
from numpy.typing import NDArray

from kernels.arrays import AnyInts, Doubles, Ints, UInt32s, UInt64s

#: The version of the draw, part of a model's fingerprint: another version gives other tokens for the same seeds.
DRAW = 2

#: The purposes of Philox numbers. Draw 1 used purpose 0.
HIGH_BITS = 1
LOW_BITS = 2

#: The coefficients of ln(m) / s in powers of s ** 2, with s = (m - 1) / (m + 1), highest power first.
LN_SERIES = tuple(2.0 / odd for odd in (15, 13, 11, 9, 7, 5, 3, 1))
LN_2 = 0.6931471805599453
#: The bits of sqrt(1 / 2), the smallest mantissa that ln() handles.
SQRT_HALF_BITS = 0x3FE6A09E667F3BCD

_NUM_HIGH = 1 << 16


def ln(x: Doubles) -> Doubles:
    """Return the natural logarithm of positive normal numbers, with a relative error of about 1e-12 also near 1."""
    bits = x.view(np.int64)
    exponent = (bits - SQRT_HALF_BITS) >> 52
    mantissa = (bits - (exponent << 52)).view(np.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = np.full_like(s, LN_SERIES[0])
    for coefficient in LN_SERIES[1:]:
        series = series * square + coefficient
    result: Doubles = exponent.astype(np.float64) * LN_2 + s * series
    return result


def gumbel(high: AnyInts, low: AnyInts) -> Doubles:
    """Return the noise for these bits. It falls as they rise. high: 16 bits; low: 32 bits."""
    bits = high.astype(np.float64) * 2.0**32 + low
    return -ln(-ln(1.0 - (bits + 0.5) * 2.0**-48))


def high_bits(seed: UInt64s, position: Ints, choice: Ints, vocab_size: int) -> NDArray[np.uint16]:
    """Return the high bits [S, vocab_size] of each token, for rows with these columns [S]."""
    words = _words(seed, position, choice, HIGH_BITS, np.arange(-(-vocab_size // 8))[None])
    halves = np.stack((words & 0xFFFF, words >> np.uint32(16)), -1)
    return halves.reshape(len(seed), -1)[:, :vocab_size].astype(np.uint16)


def noise(seed: UInt64s, position: Ints, choice: Ints, tokens: Ints) -> Doubles:
    """Return the noise [S, n] of the tokens [S, n], for rows with these columns [S]."""
    half = tokens % 8
    words = _words(seed, position, choice, HIGH_BITS, tokens // 8)
    high = np.take_along_axis(words, (half // 2)[:, :, None], -1)[:, :, 0] >> (16 * (half % 2)).astype(np.uint32)
    words = _words(seed, position, choice, LOW_BITS, tokens // 4)
    low = np.take_along_axis(words, (tokens % 4)[:, :, None], -1)[:, :, 0]
    return gumbel(high & 0xFFFF, low)


def _words(seed: UInt64s, position: Ints, choice: Ints, purpose: int, lanes: Ints) -> UInt32s:
    """Return Philox's words [S, n, 4] uint32 for the lanes [S or 1, n]."""
    counter = np.empty((len(seed), lanes.shape[1], 4), np.uint32)
    counter[:, :, 0], counter[:, :, 1] = position[:, None], choice[:, None]
    counter[:, :, 2], counter[:, :, 3] = purpose, lanes
    return philox4x32(seed.repeat(lanes.shape[1]), counter.reshape(-1, 4)).reshape(counter.shape)


@functools.cache
def noise_bounds() -> tuple[Doubles, Doubles]:
    """Return the smallest and the largest noise [2 ** 16] of tokens with these high bits.

    Only samplers without the C kernel need them, and they take longer than this module's import.
    """
    high = np.arange(_NUM_HIGH)
    margin = 1e-9  # far more than the errors of ln()
    return gumbel(high, np.array(2**32 - 1)) - margin, gumbel(high, np.array(0)) + margin


# Philox4x32-10, a counter-based random generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
#
# A number is a function of (key, counter) only, so a request's random stream does not depend on the rest of its batch.
# Key = the request's 64-bit seed; counter = (output position, choice, purpose, lane). No two uses of random numbers
# share a purpose.


_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32(key: UInt64s, counter: UInt32s) -> UInt32s:
    """Compute key [R] uint64 (low word = first key word), counter [R, 4] uint32 -> [R, 4] uint32, in ten rounds."""
    k0, k1 = key & _LOW, key >> _32
    c0, c1, c2, c3 = counter.T.astype(np.uint64)
    for _ in range(10):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (product1 >> _32) ^ c1 ^ k0, product1 & _LOW, (product0 >> _32) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return np.stack((c0, c1, c2, c3), axis=1).astype(np.uint32)
