"""Attention in Triton for requests with several query tokens: one program per query tile and KV head."""

import torch
import triton
import triton.language as tl

from kernels.triton.attention_tile import TOTALS, attention_of, before_tiles, first_of, fold_tile, load_queries, merged
from kernels.triton.attention_work import (
    PREFILL_OPTIONS,
    PREFILL_ROWS,
    SPLIT,
    TritonWork,
    kv_tile_tokens,
    prefill_parts,
    tile_tokens,
)
from kernels.triton.device import power_of_2
from kernels.triton.kv_cache import TritonKVCache


# fmt: off
@triton.jit
def prefill_kernel(
    q, out, layer, rows, positions, lasts, tables, table_width, tile_tokens, tile_counts, scale, soft_cap, sinks,
    value_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LASTS: tl.constexpr, SPLIT: tl.constexpr,
):
    """Compute one tile, consecutive tokens of one request with the query heads of one KV head, in each program.

    A program of several computes BLOCK_M rows of the tile. HAS_LASTS: tokens see those behind them up to `lasts` [T].

    The context is summed in the splits of decode_kernel, so that a token has the same bits alone in its step.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tile = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.maximum(tl.load(tile_tokens + tile), 0)
    count = tl.load(tile_counts + tile)
    first = tl.load(positions + token)
    table = tables + tl.load(rows + token).to(tl.int64) * table_width
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    mine = m // GROUP < count
    own = tl.where(mine, first + m // GROUP, -1)
    row = (token.to(tl.int64) + m // GROUP) * HEADS + head * GROUP + m % GROUP
    queries = load_queries(q, row, mine, HEAD_DIM, BLOCK_D)
    # The first split has the sinks, even if a window has left it.
    maximum, totals = before_tiles(sinks, head * GROUP + m % GROUP, mine, HAS_SINKS, BLOCK_M)
    total = first_of(totals)
    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    last = own
    end = tl.where(count > 0, first + count, 0)  # padding has -1 tokens
    if HAS_LASTS:
        last = tl.load(lasts + token + m // GROUP, mask=mine, other=-1)
        end = tl.max(last, 0) + 1
    low = 0
    if WINDOW > 0:
        low = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    for begin in range(low // SPLIT * SPLIT, end, SPLIT):
        if begin == 0:
            their_maximum, totals = maximum, tl.broadcast_to(total[:, None], (BLOCK_M, TOTALS))
            maximum = tl.full((BLOCK_M,), -float("inf"), tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
        else:
            their_maximum = tl.full((BLOCK_M,), -float("inf"), tl.float32)
            totals = tl.zeros((BLOCK_M, TOTALS), tl.float32)
        their_sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for start in range(tl.maximum(begin, low), tl.minimum(begin + SPLIT, end), BLOCK_N):
            their_maximum, totals, their_sums = fold_tile(
                queries, own, last, their_maximum, totals, their_sums, layer, table, start, end, head, scale, soft_cap,
                KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, WINDOW, HAS_CAP,
            )
        maximum, total, sums = merged(maximum, total, sums, their_maximum, first_of(totals), their_sums)
    d = tl.arange(0, BLOCK_D)[None, :]
    result = attention_of(total, sums, value_scale)
    inside = mine[:, None] & (d < HEAD_DIM)
    tl.store(out + row[:, None] * HEAD_DIM + d, result.to(out.dtype.element_ty), mask=inside)
# fmt: on


def prefill_attention(
    q: torch.Tensor,
    cache: TritonKVCache,
    layer: int,
    work: TritonWork,
    scale: float,
    out: torch.Tensor,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Compute the attention of the tokens of work's query tiles: q [T, H, D] -> out [T, H, D].

    Both are contiguous, with the cache's dtype. They may be the same: a program reads the queries that it replaces
    before it writes, and no other reads them. A row's bits only depend on its own tokens. soft_cap: scores become cap
    * tanh(score / cap). sinks [H] float32: an additional score per head, without a value.
    """
    num_tiles, num_heads = len(work.tile_tokens), q.shape[1]
    if num_tiles == 0:
        return
    assert q.is_contiguous(), q.stride()
    group = num_heads // cache.num_kv_heads
    parts = prefill_parts(cache.head_dim)
    block_m = max(PREFILL_ROWS, tile_tokens(group) * power_of_2(group)) // parts
    scales = cache.scales_of(layer)
    prefill_kernel[(num_tiles, cache.num_kv_heads, parts)](
        q,
        out,
        cache.layers[layer],
        work.rows,
        work.positions,
        work.positions if work.lasts is None else work.lasts,
        work.tables,
        work.tables.stride(0),
        work.tile_tokens,
        work.tile_counts,
        scale * scales.of_keys,
        soft_cap or 0.0,
        q if sinks is None else sinks,
        scales.of_values,
        HEADS=num_heads,
        KV_HEADS=cache.num_kv_heads,
        HEAD_DIM=cache.head_dim,
        BLOCK_D=max(16, power_of_2(cache.head_dim)),
        BLOCK_SIZE=cache.block_size,
        BLOCK_M=block_m,
        BLOCK_N=kv_tile_tokens(cache.head_dim, q.dtype),
        WINDOW=work.window or 0,
        HAS_CAP=soft_cap is not None,
        HAS_SINKS=sinks is not None,
        HAS_LASTS=work.lasts is not None,
        SPLIT=SPLIT,
        **PREFILL_OPTIONS,
    )
