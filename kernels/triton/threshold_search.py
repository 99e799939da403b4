"""Threshold search: top-k and top-p without sorting.

It finds the value where a count, or a sum of weights, over all larger logits passes a goal, by bisection over the 32
bits of a float.
"""

import triton
import triton.language as tl

#: A key below that of every number.
LOWEST_KEY = tl.constexpr(-(2**31))


@triton.jit
def ordered_key(x):
    """Map float32 to int64 in the order of the numbers; -0 and 0 have one key."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def load_scaled(row, at, vocab_size, temperature):
    """Load logits divided by the temperature, -inf past the end."""
    values = tl.load(row + at, mask=at < vocab_size, other=-float("inf"))
    return tl.where(values == -float("inf"), values, tl.div_rn(values, temperature))


@triton.jit
def measure(row, vocab_size, temperature, maximum, min_p, key, BLOCK: tl.constexpr):
    """Return the number of tokens taken and the sum of exp(logit - maximum) over them, float64.

    A token is taken if its key is at least `key` and min_p leaves it. The sum is in vocabulary order, in blocks.
    """
    count = tl.zeros((), tl.int64)
    total = tl.zeros((), tl.float64)
    for start in range(0, vocab_size, BLOCK):
        values = load_scaled(row, start + tl.arange(0, BLOCK), vocab_size, temperature)
        weights = tl.exp(values - maximum)
        taken = (ordered_key(values) >= key) & (weights >= min_p) & (values > -float("inf"))
        count += tl.sum(taken.to(tl.int64), 0)
        total += tl.sum(tl.where(taken, weights, 0.0).to(tl.float64), 0)
    return count, total


@triton.jit
def find_key(row, vocab_size, temperature, maximum, min_p, low, goal, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest key >= low whose tokens from it on number at least goal (COUNTS), or weigh more than goal.

    It is low if there is none.
    """
    high = ordered_key(maximum)
    while low < high:
        middle = low + (high - low + 1) // 2
        count, total = measure(row, vocab_size, temperature, maximum, min_p, middle, BLOCK)
        enough = count.to(tl.float64) >= goal if COUNTS else total > goal
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low
