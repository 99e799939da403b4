"""The tile step of prefill and decode attention: queries of one request and KV head against one tile of its K and V."""

import triton
import triton.language as tl

from kernels.triton.arithmetic.elementary import exp2_negative, exponential
from kernels.triton.cache_rows import load_rows
from kernels.triton.device import dot

LOG2_E = tl.constexpr(1.4426950408889634)
#: Columns of a tile's totals: the fewest that a product may have on all devices.
TOTALS = tl.constexpr(16)


@triton.jit
def load_queries(q, row, mine, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load q's rows of HEAD_DIM numbers, row [M] -> [M, BLOCK_D]; zeros if not mine."""
    d = tl.arange(0, BLOCK_D)[None, :]
    return tl.load(q + row[:, None] * HEAD_DIM + d, mask=mine[:, None] & (d < HEAD_DIM), other=0.0)


@triton.jit
def before_tiles(sinks, head, mine, HAS_SINKS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return maximum [M] and totals [M, TOTALS] before the first tile; with sinks, those of the heads' sinks if mine.

    A sink is a score without a value: it takes part in the softmax.
    """
    maximum = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SINKS:
        maximum = tl.load(sinks + head, mask=mine, other=-float("inf")) * LOG2_E
        total = tl.where(maximum == -float("inf"), 0.0, 1.0)
    return maximum, tl.broadcast_to(total[:, None], (BLOCK_M, TOTALS))


@triton.jit
def first_of(totals):
    """Return the first column [M] of totals [M, TOTALS]."""
    return tl.sum(tl.where(tl.arange(0, TOTALS)[None, :] == 0, totals, 0.0), 1)


# fmt: off
@triton.jit
def fold_tile(
    queries, own, last, maximum, totals, sums, layer, table, start, end, head, scale, soft_cap,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
):
    """Add the tokens from start on, BLOCK_N of them but none from end on, to maximum [M], totals and sums [M, BLOCK_D].

    totals [M, TOTALS]: the sum of a row's weights, in each column. It is a product with ones, because a product's order
    of summation does not depend on M, and that of tl.sum() may.

    own, last [M]: the queries' positions, and the last ones that they see; -1 = no query. A token that a row does not
    see adds exact zeros to it. WINDOW: tokens that a row sees up to itself, including itself; 0 = all before it.
    """
    at = start + tl.arange(0, BLOCK_N)
    there = at < end
    block = tl.load(table + at // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    offset = at % BLOCK_SIZE
    d = tl.arange(0, BLOCK_D)
    keys = load_rows(
        layer, block[None, :], head, offset[None, :], d[:, None], there[None, :], queries.dtype,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE,
    )
    scores = dot(queries, keys, tl.zeros((own.shape[0], BLOCK_N), tl.float32)) * scale
    if HAS_CAP:
        # cap * tanh(score / cap), with an exponential that never overflows.
        small = exponential(tl.div_rn(-2.0 * tl.abs(scores), soft_cap))
        size = tl.div_rn(soft_cap * (1.0 - small), 1.0 + small)
        scores = tl.where(scores < 0, -size, size)
    seen = at[None, :] <= last[:, None]
    if WINDOW > 0:
        seen = seen & (at[None, :] > own[:, None] - WINDOW)
    scores = tl.where(seen, scores * LOG2_E, -float("inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    finite = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    weights = exp2_negative(scores - finite[:, None])
    shrunk = exp2_negative(maximum - finite)
    values = load_rows(
        layer, block[:, None], KV_HEADS + head, offset[:, None], d[None, :], there[:, None], queries.dtype,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE,
    )
    weights = weights.to(values.dtype)
    totals = dot(weights, tl.full((BLOCK_N, TOTALS), 1.0, values.dtype), totals * shrunk[:, None])
    return new_maximum, totals, dot(weights, values, sums * shrunk[:, None])


@triton.jit
def merged(maximum, total, sums, their_maximum, their_total, their_sums):
    """Return maximum and total [M], and sums [M, D], with those of the next split."""
    new_maximum = tl.maximum(maximum, their_maximum)
    finite = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    shrunk = exp2_negative(maximum - finite)
    factor = exp2_negative(their_maximum - finite)
    total = total * shrunk + their_total * factor
    return new_maximum, total, sums * shrunk[:, None] + their_sums * factor[:, None]


@triton.jit
def attention_of(total, sums, value_scale):
    """Return the result for total [M] and sums [M, D], whose values were divided by value_scale.

    A sum that is 0 has no sign, however many splits it is from.
    """
    return (sums + 0.0) * tl.div_rn(value_scale, tl.where(total == 0, 1.0, total))[:, None]
# fmt: on
