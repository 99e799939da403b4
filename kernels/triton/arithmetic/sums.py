"""Sums in a defined order: tl.sum() leaves it to the compiler, which chooses by the layout of a tile in registers.

The second half of the numbers is added to the first, then the second quarter to the first, and so on. Sizes are powers
of two.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def _num_halvings(size: int) -> int:
    """Return how often a row is halved until it has one or two numbers, which have one sum."""
    return max(size.bit_length() - 2, 0)


@triton.jit
def sum_of(numbers):
    """Return the sum of numbers [N]."""
    for _ in tl.static_range(_num_halvings(numbers.shape[0])):
        numbers = tl.sum(tl.reshape(numbers, (2, numbers.shape[0] // 2)), 0)
    return tl.sum(numbers, 0)


@triton.jit
def sums_of_rows(numbers):
    """Return the sum [M] of each row of numbers [M, N]."""
    for _ in tl.static_range(_num_halvings(numbers.shape[1])):
        numbers = tl.sum(tl.reshape(numbers, (numbers.shape[0], 2, numbers.shape[1] // 2)), 1)
    return tl.sum(numbers, 1)


@triton.jit
def sums_of_columns(numbers):
    """Return the sum [N] of each column of numbers [M, N]."""
    for _ in tl.static_range(_num_halvings(numbers.shape[0])):
        numbers = tl.sum(tl.reshape(numbers, (2, numbers.shape[0] // 2, numbers.shape[1])), 0)
    return tl.sum(numbers, 0)
