"""Gumbel noise in Triton: the same numbers as kernels/gumbel.py, bit for bit. The Philox rounds are Triton's own.

Each operation is rounded separately: kernels/triton/device.py turns fused multiply-add off.
"""

import triton
import triton.language as tl

from kernels.gumbel import HIGH_BITS, LOW_BITS
from kernels.triton.arithmetic.elementary import ln

#: One call must compute the noise of a multiple of this many tokens: those of one block of Philox numbers.
TOKENS_PER_BLOCK = 8

_HIGH_BITS = tl.constexpr(HIGH_BITS)
_LOW_BITS = tl.constexpr(LOW_BITS)


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
