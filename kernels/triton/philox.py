"""Philox4x32-10 in Triton: the numbers of kernels/philox.py, bit for bit. The rounds are Triton's own."""

import triton
import triton.language as tl

from kernels.philox import SAMPLE_TOKEN

_SAMPLE_TOKEN = tl.constexpr(SAMPLE_TOKEN)


@triton.jit
def uniform(seed, position, choice):
    """Return float64 in (0, 1) [n], as kernels.philox.uniform with lane 0, for drawing tokens.

    seed int64 [n] (the bits of a uint64), position and choice int32 [n].
    """
    zero = position.to(tl.uint32) * 0
    high, low, _, _ = tl.philox(
        seed.to(tl.uint64, bitcast=True), position.to(tl.uint32), choice.to(tl.uint32), zero + _SAMPLE_TOKEN, zero
    )
    bits = ((high.to(tl.uint64) << 32) | low.to(tl.uint64)) >> 12
    # 52 bits: exact as int64 and as float64.
    return (bits.to(tl.int64).to(tl.float64) + 0.5) * (2.0**-52)
