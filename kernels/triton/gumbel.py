"""Gumbel noise in Triton: the same numbers as kernels/gumbel.py, bit for bit. The Philox rounds are Triton's own.

Each operation is rounded separately: kernels/triton/device.py turns fused multiply-add off.
"""

import triton
import triton.language as tl

from kernels.gumbel import HIGH_BITS, LN_2, LN_SERIES, LOW_BITS, SQRT_HALF_BITS

#: One call must compute the noise of a multiple of this many tokens: those of one block of Philox numbers.
TOKENS_PER_BLOCK = 8

_HIGH_BITS = tl.constexpr(HIGH_BITS)
_LOW_BITS = tl.constexpr(LOW_BITS)
_LN_15, _LN_13, _LN_11, _LN_9, _LN_7, _LN_5, _LN_3 = map(tl.constexpr, LN_SERIES[:-1])
_LN_2 = tl.constexpr(LN_2)
_SQRT_HALF_BITS = tl.constexpr(SQRT_HALF_BITS)


@triton.jit
def ln(x):
    """Return the natural logarithm of positive normal float64 numbers."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits - _SQRT_HALF_BITS) >> 52
    mantissa = (bits - (exponent << 52)).to(tl.float64, bitcast=True)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = square * _LN_15 + _LN_13
    series = series * square + _LN_11
    series = series * square + _LN_9
    series = series * square + _LN_7
    series = series * square + _LN_5
    series = series * square + _LN_3
    series = series * square + 2.0
    return exponent.to(tl.float64) * _LN_2 + s * series


@triton.jit
def _words(seed, position, choice, purpose: tl.constexpr, first, COUNT: tl.constexpr):
    """Return Philox's words uint32 [4 * COUNT] for COUNT lanes, starting at `first`."""
    lanes = (first + tl.arange(0, COUNT)).to(tl.uint32)
    zero = lanes * 0
    first, second, third, fourth = tl.philox(
        seed.to(tl.uint64, bitcast=True),
        zero + position.to(tl.uint32),
        zero + choice.to(tl.uint32),
        zero + purpose,
        lanes,
    )
    return tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))


@triton.jit
def noise_from(seed, position, choice, token, COUNT: tl.constexpr):
    """Return the noise float64 [COUNT] for COUNT tokens, starting at `token`. Both are multiples of TOKENS_PER_BLOCK.

    seed int64 (the bits of a uint64), position and choice int32: scalars.
    """
    words = _words(seed, position, choice, _HIGH_BITS, token // 8, COUNT // 8)
    high = tl.interleave(words & 0xFFFF, words >> 16)
    low = _words(seed, position, choice, _LOW_BITS, token // 4, COUNT // 4)
    bits = high.to(tl.int64).to(tl.float64) * 4294967296.0 + low.to(tl.int64).to(tl.float64)
    v = (bits + 0.5) * (2.0**-48)
    return -ln(-ln(1.0 - v))
