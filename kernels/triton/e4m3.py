"""Floats of 8 bits, E4M3 (OCP 8-bit Floating Point Specification, 2023): no infinity, and 448 is the largest number.

Conversions use integers and float32 only: compute capability 8.0 has no instruction for them.
"""

import triton
import triton.language as tl

#: Added to a number under 2**-6, it rounds to a multiple of 2**-9, the smallest number: the last bit of a float32 of
#: this size.
_SMALL_STEPS = tl.constexpr(2.0**14)
_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def of_e4m3(codes):
    """Return float32 numbers for their bits, which may be of any integer type: a product moves the exponent."""
    bits = codes.to(tl.int32)
    size = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    signed = size.to(tl.int32, bitcast=True) | (bits & 0x80) << 24
    return tl.where((bits & 0x7F) == 0x7F, _NAN, signed).to(tl.float32, bitcast=True)


@triton.jit
def to_e4m3(numbers):
    """Return the bits uint8 of the nearest number to each float32, of two the even one.

    A number that is larger than 448 becomes 448, and one that is not finite NaN.
    """
    bits = numbers.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    usual = (size + 0x7FFFF + (size >> 20 & 1) >> 20) - (120 << 3)
    steps = size.to(tl.float32, bitcast=True) + _SMALL_STEPS
    small = steps.to(tl.int32, bitcast=True) & 0x7FFFFF
    code = tl.where(size < 0x3C800000, small, tl.minimum(usual, 0x7E))  # 2 ** -6
    return tl.where(size >= 0x7F800000, 0x7F, code | (bits >> 24 & 0x80)).to(tl.uint8)
