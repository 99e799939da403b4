"""Paged attention over absolute KV tiles: a row's bits depend on its own tokens only (numerics level L2).

Scores, maxima, sums and accumulators are float32. The softmax's maximum is taken over all of a row's tiles (a maximum
is exact in any order); each tile then adds its share to sum and accumulator, in an order fixed by the row's position.
K and V are read only as stored in the cache, also those of this step's tokens. Every product has one of a few fixed
shapes; the probe shows that those give equal bits on this machine, whatever the number of items multiplied at once.
"""

import hashlib
import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch

from kernels.attention_metadata import KV_TILE, AttentionMetadata, TileShape, WorkGroup
from kernels.kv_cache import KVCache
from kernels.linear import probe_inputs
from kernels.whole_vectors import in_whole_vectors, is_position_independent

EXP2_ = torch.exp2_

#: exp(x) = 2 ** (x * log2(e)); the factor is folded into the scale.
_LOG2_E = math.log2(math.e)

#: Numbers of items multiplied at once that the probe compares.
_PROBE_BATCHES = (1, 2, 3, 5, 8, 48)


def paged_attention(
    q: torch.Tensor, cache: KVCache, layer: int, metadata: AttentionMetadata, scale: float
) -> torch.Tensor:
    """Causal attention of a mixed batch. q [num_rows, H, D] float32 (rotated) -> [num_rows, H * D], the cache's dtype.

    This step's K and V are in the cache already. Padding rows of the output hold finite numbers of no meaning.
    """
    width = q.shape[1] * q.shape[2]
    q = q.reshape(-1, cache.head_dim)
    if len(metadata.groups) == 1:
        group = metadata.groups[0]
        return _attend(q, cache, layer, group, scale).index_select(0, group.out_rows).to(cache.dtype).view(-1, width)
    out = torch.zeros(metadata.num_rows, width, dtype=cache.dtype)
    for group in metadata.groups:
        assert group.out_tokens is not None, "only a lone group makes the whole output"
        part = _attend(q, cache, layer, group, scale).index_select(0, group.out_rows)
        out.index_copy_(0, group.out_tokens, part.to(cache.dtype).view(-1, width))
    return out


def _attend(q: torch.Tensor, cache: KVCache, layer: int, group: WorkGroup, scale: float) -> torch.Tensor:
    """q [T * H, D] -> [n * Hkv * M, D] float32, in scratch. W items, n query tiles, M rows; distance 0 comes first."""
    num_heads, head_dim, scratch = cache.num_kv_heads, cache.head_dim, cache.scratch
    n, rows, num_items = group.num_query_tiles, group.rows, len(group.item_query)
    products = num_items * num_heads
    keys, values = _gather(cache, layer, group).view(2, products, KV_TILE, head_dim).unbind(0)
    # Tokens that a row must not see have weight 0, but 0 * NaN is NaN. A token gone wrong still shows to those that see
    # it: its K is NaN too.
    values[: group.num_partial * num_heads].nan_to_num_(0.0, 0.0, 0.0)

    queries = scratch.get("queries", (products * rows, head_dim), torch.float32)
    torch.index_select(q, 0, group.q_rows, out=queries)
    scores = scratch.get("scores", (products, rows, KV_TILE), torch.float32)
    torch.baddbmm(
        _NOTHING,
        queries.view(products, rows, head_dim),
        keys.transpose(1, 2),
        beta=0.0,
        alpha=scale * _LOG2_E,
        out=scores,
    )
    by_item = scores.view(num_items, num_heads, rows, KV_TILE)
    by_item[: len(group.mask)].masked_fill_(group.mask, -torch.inf)

    item_maximum = by_item.amax(-1, keepdim=True)
    maximum = item_maximum[:n]
    _for_each_distance(group, item_maximum, torch.maximum)
    by_item.sub_(maximum if num_items == n else maximum.index_select(0, group.item_query))
    weights = in_whole_vectors(EXP2_, scores)
    total = by_item.sum(-1, keepdim=True)
    _for_each_distance(group, total, torch.add)
    out = scratch.get("out", (products, rows, head_dim), torch.float32)
    torch.bmm(weights, values, out=out)
    out = out.view(num_items, num_heads, rows, head_dim)
    _for_each_distance(group, out, torch.add)
    return out[:n].div_(total[:n]).view(-1, head_dim)


def _gather(cache: KVCache, layer: int, group: WorkGroup) -> torch.Tensor:
    """K and V of all items [2 * W * Hkv * KV_TILE, D] float32, in scratch; 0 where no token is to be seen."""
    runs = cache.layers[layer].view(-1, cache.block_size * cache.head_dim)
    shape = (len(group.kv_rows), cache.block_size * cache.head_dim)
    gathered = cache.scratch.get("gathered", shape, cache.dtype)
    torch.index_select(runs, 0, group.kv_rows, out=gathered)
    if cache.dtype != torch.float32:
        gathered = cache.scratch.get("gathered", shape, torch.float32).copy_(gathered)
    return gathered.view(-1, cache.head_dim).index_fill_(0, group.tail_rows, 0.0)


def _for_each_distance(group: WorkGroup, items: torch.Tensor, merge: Callable[..., torch.Tensor]) -> None:
    """Merge items at distance 1, 2, ... into those at distance 0, in place and in that order."""
    first = group.counts[0]
    for count in group.counts[1:]:
        merge(items[:count], items[first : first + count], out=items[:count])
        first += count


_NOTHING = torch.zeros(1, 1, 1)


class AttentionVariant(NamedTuple):
    """How attention of one model is computed on this machine."""

    shape: TileShape
    row_invariant: bool  # the probe found one class of results; false: numerics level L0
    signature: str

    def __str__(self) -> str:
        tiles = ",".join(str(size) for size in self.shape.query_tiles)
        return f"tiles[{tiles}x{KV_TILE}]:{self.signature}{'' if self.row_invariant else ':L0'}"


def attention_variant(num_heads: int, num_kv_heads: int, head_dim: int) -> AttentionVariant:
    """The tile sizes to use here: several query tiles if their products agree bitwise, else one."""
    return _choose(num_heads, num_kv_heads, head_dim, torch.get_num_threads())


@lru_cache(maxsize=16)
def _choose(num_heads: int, num_kv_heads: int, head_dim: int, num_threads: int) -> AttentionVariant:
    """num_threads belongs to the cache key: libraries cut products by it."""
    for query_tiles in ((1, 16, 64), (1, 16), (16,), (1,)):
        shape = TileShape(num_heads, num_kv_heads, head_dim, query_tiles)
        signatures = {
            probe_products(shape.rows(size), head_dim, batch) for size in query_tiles for batch in _PROBE_BATCHES
        }
        if len(signatures) == 1 and None not in signatures and is_position_independent(EXP2_):
            return AttentionVariant(shape, True, str(signatures.pop()))
    return AttentionVariant(shape, False, "unproven")


def probe_products(rows: int, head_dim: int, batch: int) -> str | None:
    """Digest of one row of both products, all rows and items being copies; None if they do not agree bitwise."""
    row, key = probe_inputs(KV_TILE, head_dim, torch.float32)
    scores = torch.baddbmm(
        _NOTHING, row.repeat(batch, rows, 1), key.repeat(batch, 1, 1).transpose(1, 2), beta=0.0, alpha=0.125
    )
    row, value = probe_inputs(head_dim, KV_TILE, torch.float32)
    out = torch.bmm(row.repeat(batch, rows, 1), value.t().contiguous().repeat(batch, 1, 1))
    if not (bool((scores == scores[0, 0]).all()) and bool((out == out[0, 0]).all())):
        return None
    return hashlib.blake2b(scores[0, 0].numpy().tobytes() + out[0, 0].numpy().tobytes(), digest_size=4).hexdigest()
