"""Elementary functions of float32 whose bits are defined: only operations that IEEE 754 defines, in a fixed order.

A device's own exponential is an approximation, which differs between kinds of devices, and which a CPU cannot compute.
The polynomials are those of the C kernels (kernels/cpu/c/math/vector_math.h). Divide with tl.div_rn() and take roots
with tl.sqrt_rn() next to these functions.
"""

import math

import triton
import triton.language as tl

from kernels.gumbel import LN_2, LN_SERIES, SQRT_HALF_BITS

_LOG2_E = tl.constexpr(1.44269504)
#: Added to a number under 2**22 and subtracted again, it rounds to the nearest integer.
_INTEGERS = tl.constexpr(1.5 * 2.0**23)
_LN_2_HIGH, _LN_2_LOW = tl.constexpr(0.693359375), tl.constexpr(-2.12194440e-4)
_ONE = tl.constexpr(0x3F800000)
#: The same for float64.
_WHOLE = tl.constexpr(1.5 * 2.0**52)
_2_OVER_PI = tl.constexpr(2 / math.pi)
#: pi / 2: 33 bits, the next 33, and the rest.
_HALF_PI_1, _HALF_PI_2, _HALF_PI_3 = (
    tl.constexpr(float.fromhex(part))
    for part in ("0x1.921fb54400000p+0", "0x1.0b4611a600000p-34", "0x1.3198a2e037073p-69")
)
_COS_SERIES = tl.constexpr(tuple((-1) ** n / math.factorial(2 * n) for n in range(9, 0, -1)))
_SIN_SERIES = tl.constexpr(tuple((-1) ** n / math.factorial(2 * n + 1) for n in range(8, -1, -1)))
_LN_15, _LN_13, _LN_11, _LN_9, _LN_7, _LN_5, _LN_3 = map(tl.constexpr, LN_SERIES[:-1])
_LN_2 = tl.constexpr(LN_2)
_SQRT_HALF_BITS = tl.constexpr(SQRT_HALF_BITS)


@triton.jit
def _power_of_two(shifted, part):
    """Return 2 ** (whole + part) for part in [-0.5, 0.5]; shifted: whole + _INTEGERS, a float32 whose lowest bits are
    the integer."""
    p = tl.fma(part, 1.5461448e-04, 1.3390867e-03)
    p = tl.fma(p, part, 9.6180570e-03)
    p = tl.fma(p, part, 5.5503570e-02)
    p = tl.fma(p, part, 2.4022650e-01)
    p = tl.fma(p, part, 6.9314720e-01)
    p = tl.fma(p, part, 1.0)
    return p * ((shifted.to(tl.int32, bitcast=True) << 23) + _ONE).to(tl.float32, bitcast=True)


@triton.jit
def exp2_negative(x):
    """Return 2 ** x for x <= 0: exactly 1 at 0, exactly 0 below -126.5; NaN stays NaN."""
    x = tl.maximum(x, -127.0, tl.PropagateNan.ALL)  # whose power has an exponent of 0 bits: it is 0
    shifted = x + _INTEGERS
    return _power_of_two(shifted, x - (shifted - _INTEGERS))


@triton.jit
def exponential(x):
    """Return e ** x with x limited to [-87, 88]; NaN stays NaN."""
    x = tl.minimum(tl.maximum(x, -87.0, tl.PropagateNan.ALL), 88.0, tl.PropagateNan.ALL)
    shifted = x * _LOG2_E + _INTEGERS
    whole = shifted - _INTEGERS
    part = tl.fma(whole, -_LN_2_HIGH, x)
    part = tl.fma(whole, -_LN_2_LOW, part)
    return _power_of_two(shifted, part * _LOG2_E)


@triton.jit
def hyperbolic_tangent(x):
    """Return tanh(x); NaN stays NaN."""
    size, square = tl.abs(x), x * x
    p = tl.fma(square, -5.66078536e-03, 2.06020046e-02)
    p = tl.fma(p, square, -5.37292287e-02)
    p = tl.fma(p, square, 1.33313283e-01)
    p = tl.fma(p, square, -3.33332777e-01)
    large = 1.0 - tl.div_rn(2.0, exponential(size + size) + 1.0)
    return tl.where(size < 0.625, tl.fma(x * square, p, x), tl.where(x < 0.0, -large, large))


@triton.jit
def softplus(x):
    """Return ln(1 + e ** x): the series of 2 artanh(u / (2 + u)) for u = e ** -|x|; NaN stays NaN."""
    u = exponential(-tl.abs(x))
    s = tl.div_rn(u, u + 2.0)
    square = s * s
    sums = tl.fma(square, 1.0 / 15, 1.0 / 13)
    for n in tl.static_range(11, 0, -2):
        sums = tl.fma(sums, square, 1.0 / n)
    return tl.fma(s + s, sums, tl.where(x > 0.0, x, 0.0))


@triton.jit
def error_function(x):
    """Return erf(x); NaN stays NaN."""
    x = tl.minimum(tl.maximum(x, -4.0, tl.PropagateNan.ALL), 4.0, tl.PropagateNan.ALL)
    square = x * x
    p = tl.fma(square, 1.9867550e-06, 2.8456259e-04)
    p = tl.fma(p, square, 3.8833097e-03)
    p = tl.fma(p, square, 5.3101640e-02)
    p = tl.fma(p, square, 1.9354464e-01)
    p = tl.fma(p, square, 1.1283791)
    q = tl.fma(square, 3.7419712e-05, 1.1855579e-03)
    q = tl.fma(q, square, 1.5207187e-02)
    q = tl.fma(q, square, 1.1534978e-01)
    q = tl.fma(q, square, 5.0485700e-01)
    q = tl.fma(q, square, 1.0)
    return tl.div_rn(x * p, q)


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
def cos_sin(x):
    """Return the cosines and sines of float64 numbers under 2 ** 20 in size: Taylor's series, up to pi / 4."""
    quarters = x * _2_OVER_PI + _WHOLE
    n = quarters - _WHOLE
    r = x - n * _HALF_PI_1 - n * _HALF_PI_2 - n * _HALF_PI_3  # the first two products are exact
    square = r * r
    cos = square * _COS_SERIES[0] + _COS_SERIES[1]
    sin = square * _SIN_SERIES[0] + _SIN_SERIES[1]
    for term in tl.static_range(2, 9):
        cos = cos * square + _COS_SERIES[term]
        sin = sin * square + _SIN_SERIES[term]
    cos = cos * square + 1.0
    sin = sin * r
    turn = quarters.to(tl.int64, bitcast=True) & 3
    swapped = (turn & 1) == 1
    first, second = tl.where(swapped, sin, cos), tl.where(swapped, cos, sin)
    return tl.where((turn == 1) | (turn == 2), -first, first), tl.where(turn >= 2, -second, second)
