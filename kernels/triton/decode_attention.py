"""Attention in Triton for requests with one query token, and for those with few.

One program computes SPLIT tokens of context for one KV head, with all its query heads together. A merge in the order of
the splits follows. The bounds of the splits only depend on a token's own position, so its bits do not depend on the
batch. Consecutive tokens of one request can share a program, which reads their context once: a token that another one
does not see adds exact zeros to it.
"""

import torch
import triton
import triton.language as tl

from kernels.triton.attention_tile import attention_of, before_tiles, first_of, fold_tile, load_queries, merged
from kernels.triton.attention_work import SPLIT, TritonWork, decode_rows, kv_tile_tokens
from kernels.triton.device import power_of_2
from kernels.triton.kv_cache import TritonKVCache
from kernels.triton.shared_prefix import shared_prefix


# fmt: off
@triton.jit(do_not_specialize=["num_splits"])
def decode_kernel(
    q, out, partial_sums, partial_stats, layer, rows, positions, tables, table_width, tokens, scale, soft_cap,
    sinks, shared, common, num_splits, value_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, DIRECT: tl.constexpr,
    WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, SHARES: tl.constexpr,
    HAS_COMMON: tl.constexpr,
):
    """Compute one split of one token and KV head; if it SHARES, of as many tokens as `shared` says, or of none.

    DIRECT, for one split: the result goes to out. Otherwise the sums so far go to partial_sums [n, splits, H, D] and
    partial_stats [n, splits, H, 2] (maximum, total), even for a split that sees nothing. HAS_COMMON: not for those that
    shared_prefix_kernel computes.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    index = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    token = tl.load(tokens + index).to(tl.int64)
    position = tl.load(positions + tl.maximum(token, 0))
    m = tl.arange(0, BLOCK_M)
    count = 1
    ahead = 0  # for each row of the product: how many tokens it is after the first
    member = m
    if SHARES:
        count = tl.load(shared + index)
        ahead = m // GROUP
        member = m % GROUP
    last = position + count - 1
    first_split = 0
    if HAS_COMMON:
        first_split = tl.load(common)
    if (split * SPLIT <= tl.maximum(last, 0)) & (count > 0) & (split >= first_split) & (token >= 0):
        # Padding has row -1 and position -1: it reads no table.
        table = tables + tl.maximum(tl.load(rows + token), 0).to(tl.int64) * table_width
        mine = m < GROUP * count
        own = tl.where(mine, position + ahead, -1)
        row = (token + ahead) * HEADS + head * GROUP + member
        queries = load_queries(q, row, mine, HEAD_DIM, BLOCK_D)
        # The first split has the sinks, even if it sees nothing.
        having = m < tl.where(split == 0, GROUP * count, 0)
        maximum, totals = before_tiles(sinks, head * GROUP + member, having, HAS_SINKS, BLOCK_M)
        sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        end = tl.minimum((split + 1) * SPLIT, last + 1)
        low = split * SPLIT
        if WINDOW > 0:
            low = tl.maximum(tl.maximum(position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N, low)
        for start in range(low, end, BLOCK_N):
            maximum, totals, sums = fold_tile(
                queries, own, own, maximum, totals, sums, layer, table, start, end, head, scale, soft_cap,
                KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, WINDOW, HAS_CAP,
            )
        part = ((index.to(tl.int64) + ahead) * num_splits + split) * HEADS + head * GROUP + member
        total = first_of(totals)
        _store(
            out, partial_sums, partial_stats, row, part, mine, maximum, total, sums, value_scale,
            HEAD_DIM, BLOCK_D, DIRECT,
        )


@triton.jit
def _store(
    out, partial_sums, partial_stats, row, part, mine, maximum, total, sums, value_scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, DIRECT: tl.constexpr,
):
    """Store the result of each of `mine` in its row of out if DIRECT, otherwise as a part to be merged."""
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = mine[:, None] & (d < HEAD_DIM)
    if DIRECT:
        result = attention_of(total, sums, value_scale)
        tl.store(out + row[:, None] * HEAD_DIM + d, result.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(partial_sums + part[:, None] * HEAD_DIM + d, sums, mask=inside)
        tl.store(partial_stats + part * 2, maximum, mask=mine)
        tl.store(partial_stats + part * 2 + 1, total, mask=mine)
# fmt: on


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    out,
    partial_sums,
    partial_stats,
    positions,
    tokens,
    num_splits,
    value_scale,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Merge the splits of one query head of a token in ascending order, one head per program."""
    index = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    token = tl.load(tokens + index).to(tl.int64)
    if token >= 0:
        position = tl.load(positions + token)
        one = tl.zeros((1,), tl.int32)
        d = tl.arange(0, BLOCK_D)[None, :]
        inside = d < HEAD_DIM
        maximum = tl.full((1,), -float("inf"), tl.float32)
        total = tl.zeros((1,), tl.float32)
        sums = tl.zeros((1, BLOCK_D), tl.float32)
        for split in range(tl.maximum(position, 0) // SPLIT + 1):
            part = (index * num_splits + split) * HEADS + head
            theirs = tl.load(partial_sums + part * HEAD_DIM + d, mask=inside, other=0.0)
            stats = partial_stats + part * 2
            maximum, total, sums = merged(maximum, total, sums, tl.load(stats + one), tl.load(stats + 1 + one), theirs)
        result = attention_of(total, sums, value_scale)
        tl.store(out + (token * HEADS + head) * HEAD_DIM + d, result.to(out.dtype.element_ty), mask=inside)


def decode_attention(
    q: torch.Tensor,
    cache: TritonKVCache,
    layer: int,
    work: TritonWork,
    scale: float,
    out: torch.Tensor,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Compute the attention of work's decode_tokens like prefill_attention: q [T, H, D] -> out [T, H, D].

    Padding gets zeros, and index -1 is skipped. A token's bits are the same whether or not it shares a program.
    """
    count, num_heads, splits = len(work.decode_tokens), q.shape[1], max(1, work.num_splits)
    if count == 0:
        return
    (of_keys, of_values), kv_heads, head_dim = cache.scales_of(layer), cache.num_kv_heads, cache.head_dim
    scale *= of_keys
    shape = {"HEADS": num_heads, "HEAD_DIM": head_dim, "BLOCK_D": max(16, power_of_2(head_dim)), "SPLIT": SPLIT}
    parts = count * splits if splits > 1 else 0
    assert q.is_contiguous(), q.stride()
    sums = torch.empty((parts, num_heads, head_dim), dtype=torch.float32, device=q.device)
    stats = torch.empty((parts, num_heads, 2), dtype=torch.float32, device=q.device)
    constants = {
        **shape,
        "KV_HEADS": kv_heads,
        "BLOCK_SIZE": cache.block_size,
        "BLOCK_N": kv_tile_tokens(cache.head_dim, q.dtype),
        "HAS_CAP": soft_cap is not None,
        "HAS_SINKS": sinks is not None,
    }
    has_common = work.common is not None and work.window is None and work.shared is None and splits > 1
    if has_common:
        shared_prefix(q, cache, layer, work, (sums, stats), constants, scale=scale, soft_cap=soft_cap, sinks=sinks)
    decode_kernel[(count, kv_heads, splits)](
        q,
        out,
        sums,
        stats,
        cache.layers[layer],
        *(work.rows, work.positions, work.tables, work.tables.stride(0), work.decode_tokens),
        scale,
        soft_cap or 0.0,
        q if sinks is None else sinks,
        work.decode_tokens if work.shared is None else work.shared,
        work.common if has_common else work.decode_tokens,
        splits,
        of_values,
        **constants,
        BLOCK_M=decode_rows(num_heads // kv_heads),
        DIRECT=splits == 1,
        WINDOW=work.window or 0,
        SHARES=work.shared is not None,
        HAS_COMMON=has_common,
    )
    if splits > 1:
        merge_kernel[(count, num_heads)](
            out, sums, stats, work.positions, work.decode_tokens, splits, of_values, **shape
        )
