"""Rows of K and V as a KV cache stores them: as they are, as codes with a scale, or as 8-bit floats.

The type of a layer's tensor says which. Other types than these two: the numbers themselves.

- int8: codes from -127 to 127, and a float32 scale for each token and head, as kernels/cpu/c/attention/cache_codes.h
  defines them. The codes of a head's tokens of a block come first, then their scales.
- uint8: floats of 8 bits (e4m3.py), without scales.

A read gives numbers of the model's dtype.
"""

import triton
import triton.language as tl

from kernels.triton.e4m3 import of_e4m3, to_e4m3

#: A scale, its inverse and its products with codes are normal numbers.
_LEAST_LARGEST = tl.constexpr(2.0**-100)
#: So far below 1/127 that 127 times a product is not more than before.
_A_127TH = tl.constexpr(float.fromhex("0x1.020406p-7"))
#: Added to a number under 2**22 and subtracted again, it rounds to the nearest integer, and of two to the even one.
_INTEGERS = tl.constexpr(1.5 * 2.0**23)
_NAN = tl.constexpr(0x7FC00000)


@triton.constexpr_function
def _padded(head_dim: int) -> int:
    return (head_dim + 3) // 4 * 4


# fmt: off
@triton.jit
def _row_at(
    layer, block, head, offset,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):
    """Return pointers to the rows of tokens."""
    side = block * 2 * KV_HEADS + head
    if layer.dtype.element_ty == tl.int8:
        at = side * (BLOCK_SIZE * (_padded(HEAD_DIM) + 4)) + offset * _padded(HEAD_DIM)
    else:
        at = (side * BLOCK_SIZE + offset) * HEAD_DIM
    return layer + at


@triton.jit
def _scale_at(
    layer, block, head, offset,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):
    """Return pointers to the scales of rows in an int8 layer."""
    side = block * 2 * KV_HEADS + head
    at = layer + side * (BLOCK_SIZE * (_padded(HEAD_DIM) + 4)) + (BLOCK_SIZE * _padded(HEAD_DIM) + offset * 4)
    return at.to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def load_rows(
    layer, block, head, offset, column, there, DTYPE: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):
    """Return a tile of rows of DTYPE: zeros if not there, and in columns from HEAD_DIM on.

    block (int64), offset, there [N, 1] of N tokens with column [1, D], or [1, N] with [D, 1]. head: V's follow K's.
    """
    at = _row_at(layer, block, head, offset, KV_HEADS, HEAD_DIM, BLOCK_SIZE) + column
    stored = tl.load(at, mask=there & (column < HEAD_DIM), other=0)
    if layer.dtype.element_ty == tl.int8:
        scales = tl.load(_scale_at(layer, block, head, offset, KV_HEADS, HEAD_DIM, BLOCK_SIZE), mask=there, other=0.0)
        numbers = (stored.to(tl.float32) * scales).to(DTYPE)
    elif layer.dtype.element_ty == tl.uint8:
        numbers = of_e4m3(stored).to(DTYPE)
    else:
        numbers = stored
    return numbers


@triton.jit
def largest_of(layer, numbers):
    """Return the bits [rows, 1] of the largest number of each row [rows, n], without its sign, as int32.

    Only an int8 layer needs it: 0 for others.
    """
    if layer.dtype.element_ty == tl.int8:
        largest = tl.max(numbers.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)[:, None]
    else:
        largest = 0
    return largest


@triton.jit
def store_rows(
    layer, block, head, offset, numbers, column, inside, largest,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):
    """Store columns [1, n] of one token's rows: numbers [heads, n], of the heads [heads, 1] that are `inside`.

    largest: largest_of() the whole rows.
    """
    at = _row_at(layer, block, head, offset, KV_HEADS, HEAD_DIM, BLOCK_SIZE) + column
    if layer.dtype.element_ty == tl.int8:
        scales, inverses = _scales_of(largest)
        tl.store(at, _codes_of(numbers, inverses), mask=inside)
        places = _scale_at(layer, block, head, offset, KV_HEADS, HEAD_DIM, BLOCK_SIZE) + tl.zeros_like(column)
        tl.store(places, scales, mask=inside & (column == 0))
    elif layer.dtype.element_ty == tl.uint8:
        tl.store(at, to_e4m3(numbers.to(tl.float32)), mask=inside)
    else:
        tl.store(at, numbers, mask=inside)
# fmt: on


@triton.jit
def _scales_of(largest):
    """Return the scales for the bits of rows' largest numbers, and what their numbers are multiplied by: float32.

    A row with a number that is not finite has the scale NaN, and one of small numbers 0: their codes are 0.
    """
    number = largest.to(tl.float32, bitcast=True)
    is_finite = largest < 0x7F800000
    is_plain = is_finite & (number >= _LEAST_LARGEST)
    scales = tl.where(is_plain, number * _A_127TH, 1.0)
    inverses = tl.where(is_plain, tl.div_rn(1.0, scales), 0.0)
    nan = tl.full(largest.shape, _NAN, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(is_plain, scales, tl.where(is_finite, 0.0, nan)), inverses


@triton.jit
def _codes_of(numbers, inverses):
    """Return the codes int8 of numbers in rows with these inverses of scales."""
    finite = tl.where(inverses > 0, numbers.to(tl.float32), 0.0)
    return (finite * inverses + _INTEGERS - _INTEGERS).to(tl.int8)
