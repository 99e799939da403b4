"""Cascade attention in Triton: splits of the context that all decode tokens of a step have in common are read once.

A program computes one split for one KV head and the queries of many requests, as rows of one product. Each row has the
bits that decode_kernel would give it: see dot() in device.py.
"""

import torch
import triton
import triton.language as tl

from kernels.rounding import ceil_div
from kernels.triton.attention_tile import before_tiles, first_of, fold_tile, load_queries
from kernels.triton.attention_work import TritonWork, decode_rows
from kernels.triton.kv_cache import TritonKVCache

#: Rows of a program's products, if the step has so many.
MOST_ROWS = 64


# fmt: off
@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
def shared_prefix_kernel(
    q, partial_sums, partial_stats, layer, rows, positions, tables, table_width, tokens, num_tokens, scale, soft_cap,
    sinks, common, num_splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):
    """Compute one of the first `common` splits for as many tokens as BLOCK_M rows have room for.

    partial_sums [n, splits, H, D] and partial_stats [n, splits, H, 2]: see decode_kernel.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    head = tl.program_id(1)
    split = tl.program_id(2)
    if split < tl.load(common):
        m = tl.arange(0, BLOCK_M)
        first = tl.program_id(0) * TOKENS
        index = first + m // GROUP
        mine = (m < TOKENS * GROUP) & (index < num_tokens)
        token = tl.load(tokens + index, mask=mine, other=0).to(tl.int64)
        # Padding has position -1, and sees nothing. It follows all others.
        own = tl.load(positions + token, mask=mine, other=-1)
        place = tl.maximum(tl.load(rows + tl.load(tokens + first)), 0).to(tl.int64)
        member = head * GROUP + m % GROUP
        row = token * HEADS + member
        queries = load_queries(q, row, mine, HEAD_DIM, BLOCK_D)
        having = m < tl.where(split == 0, TOKENS * GROUP, 0)
        maximum, totals = before_tiles(sinks, member, having, HAS_SINKS, BLOCK_M)
        sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        end = (split + 1) * SPLIT
        for start in range(split * SPLIT, end, BLOCK_N):
            maximum, totals, sums = fold_tile(
                queries, own, own, maximum, totals, sums, layer, tables + place * table_width, start, end, head, scale,
                soft_cap, KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, 0, HAS_CAP,
            )
        part = (index.to(tl.int64) * num_splits + split) * HEADS + member
        d = tl.arange(0, BLOCK_D)[None, :]
        tl.store(partial_sums + part[:, None] * HEAD_DIM + d, sums, mask=mine[:, None] & (d < HEAD_DIM))
        tl.store(partial_stats + part * 2, maximum, mask=mine)
        tl.store(partial_stats + part * 2 + 1, first_of(totals), mask=mine)
# fmt: on


def most_rows(head_dim: int) -> int:
    """Return the most rows of a program's products: fewer of long heads, for which registers have no room."""
    return MOST_ROWS if head_dim <= 256 else 16


def shared_prefix(
    q: torch.Tensor,
    cache: TritonKVCache,
    layer: int,
    work: TritonWork,
    partials: tuple[torch.Tensor, torch.Tensor],
    constants: dict[str, int | bool],
    *,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    """Write the partial sums and stats of the splits that work's decode tokens have in common.

    constants: those of decode_kernel.
    """
    group, count = q.shape[1] // cache.num_kv_heads, len(work.decode_tokens)
    rows = decode_rows(group)
    if count * group > rows:
        rows = max(rows, most_rows(cache.head_dim))
    shared_prefix_kernel[(ceil_div(count, rows // group), cache.num_kv_heads, work.num_splits)](
        q,
        *partials,
        cache.layers[layer],
        *(work.rows, work.positions, work.tables, work.tables.stride(0), work.decode_tokens),
        count,
        scale,
        soft_cap or 0.0,
        q if sinks is None else sinks,
        work.common,
        work.num_splits,
        BLOCK_M=rows,
        **constants,
    )
