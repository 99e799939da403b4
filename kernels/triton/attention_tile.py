"""The tile step of prefill and decode attention: queries of one request and KV head against one tile of its K and V."""

import triton
import triton.language as tl

from kernels.triton.device import dot

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_queries(q, row, mine, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load q's rows of HEAD_DIM numbers, row [M] -> [M, BLOCK_D]; zeros if not mine."""
    d = tl.arange(0, BLOCK_D)[None, :]
    return tl.load(q + row[:, None] * HEAD_DIM + d, mask=mine[:, None] & (d < HEAD_DIM), other=0.0)


@triton.jit
def before_tiles(sinks, head, mine, HAS_SINKS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return maximum [M] and total [M] before the first tile; with sinks, those of the heads' [M] sinks if mine.

    A sink is a score without a value: it takes part in the softmax.
    """
    maximum = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SINKS:
        maximum = tl.load(sinks + head, mask=mine, other=-float("inf")) * LOG2_E
        total = tl.where(maximum == -float("inf"), 0.0, 1.0)
    return maximum, total


# fmt: off
@triton.jit
def fold_tile(
    queries, own, maximum, total, sums, layer, table, start, end, head, scale, soft_cap,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, UPCAST: tl.constexpr,
):
    """Add the tokens from start on, BLOCK_N of them but none from end on, to maximum, total [M] and sums [M, BLOCK_D].

    own [M]: the queries' positions, -1 = no query. A token that a row does not see adds exact zeros to it. WINDOW:
    tokens that a row sees, including itself; 0 = all before it.
    """
    at = start + tl.arange(0, BLOCK_N)
    there = at < end
    block = tl.load(table + at // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    row = ((block * 2 * KV_HEADS + head) * BLOCK_SIZE + at % BLOCK_SIZE) * HEAD_DIM
    d = tl.arange(0, BLOCK_D)
    keys = tl.load(layer + row[None, :] + d[:, None], mask=there[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
    scores = dot(queries, keys, UPCAST) * scale
    if HAS_CAP:
        # cap * tanh(score / cap), with an exponential that never overflows.
        small = tl.exp(-2.0 * tl.abs(scores) / soft_cap)
        size = soft_cap * (1.0 - small) / (1.0 + small)
        scores = tl.where(scores < 0, -size, size)
    seen = at[None, :] <= own[:, None]
    if WINDOW > 0:
        seen = seen & (at[None, :] > own[:, None] - WINDOW)
    scores = tl.where(seen, scores * LOG2_E, -float("inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    finite = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    weights = tl.exp2(scores - finite[:, None])
    shrunk = tl.exp2(maximum - finite)
    values_at = layer + KV_HEADS * BLOCK_SIZE * HEAD_DIM + row[:, None] + d[None, :]
    values = tl.load(values_at, mask=there[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    sums = sums * shrunk[:, None] + dot(weights.to(values.dtype), values, UPCAST)
    return new_maximum, total * shrunk + tl.sum(weights, 1), sums
# fmt: on
