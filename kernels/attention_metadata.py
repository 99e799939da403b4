"""What attention must know of a step, worked out once and used by every layer: gather indices, masks, merge order.

The unit of work is an *item*: one query tile against one KV tile. KV tiles are the KV_TILE tokens from an absolute
multiple of KV_TILE; query tiles are up to 1, 16 or 64 tokens of one request between absolute multiples of that number,
so that a query tile never straddles a KV tile boundary and every row in it sees the same number of KV tiles. All
items of a WorkGroup run as one batched product.

Items are ordered by the distance of their KV tile from the query tile's last one, query tiles by their number of KV
tiles, descending: items at distance j are those of the first counts[j] query tiles, a contiguous run, and without a
window only distance 0 needs a mask. Partial results are summed in this order, which is a function of a row's own
position.

With a sliding window a query tile's first KV tile is the one that its first row still sees. Later rows of the query
tile may see nothing of it: for them all of that item is masked, which adds exact zeros to what they have, so that their
bits are those of a query tile that does not visit it.
"""

from dataclasses import dataclass

import numpy as np
import torch

from kernels.arrays import AnyInts, Bools, Int32s, Ints
from kernels.kv_cache import KVCache
from kernels.rounding import round_up

#: Tokens in a KV tile; a multiple of every block size.
KV_TILE = 128

#: Bytes of gathered K, V and scores one work group may take: stays in a CPU's shared cache, and bounds memory.
WORK_GROUP_BYTES = 8 << 20


@dataclass(frozen=True)
class TileShape:
    """Sizes that fix the shape of attention's products, whatever the batch."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    query_tiles: tuple[int, ...] = (1, 16, 64)  # tokens, ascending

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    def rows(self, query_tile: int) -> int:
        """Rows of a query tile's products: tokens x query heads of one KV head, padded to a multiple of 4."""
        return round_up(query_tile * self.group_size, 4)


@dataclass(frozen=True)
class WorkGroup:
    """Some query tiles of one size and all their items. n query tiles, W items, M rows per tile and KV head."""

    query_tile: int  # tokens
    num_query_tiles: int  # n
    rows: int  # M
    counts: tuple[int, ...]  # [max KV tiles]; sums to W
    item_query: torch.Tensor  # [W] int64 query tile of each item
    kv_rows: torch.Tensor  # int64 runs (block, K or V, head) to gather, ordered (K or V, item, head, block of the tile)
    tail_rows: torch.Tensor  # int64 rows of the gathered [2 * W * Hkv * KV_TILE] that no query of the tile may see
    q_rows: torch.Tensor  # [W * Hkv * M] int64 rows of q [T * H]
    mask: torch.Tensor  # [m, 1, M or 1, KV_TILE] bool, true = not visible; m >= n: no item after these needs one
    num_partial: int  # the first items, among which are all with a token that one of their rows sees and another not
    out_rows: torch.Tensor  # [t * H] int64 rows of the result [n * Hkv * M], in token order
    out_tokens: torch.Tensor | None  # [t] int64; None = this group alone makes the whole output


@dataclass(frozen=True)
class AttentionMetadata:
    """One step's attention work; see attention_metadata."""

    shape: TileShape
    num_tokens: Ints  # [R]
    context_lens: Ints  # [R]
    block_tables: Int32s  # [R, P]
    num_rows: int  # rows of q and of the output; those past sum(num_tokens) are padding
    window: int | None  # tokens that a row sees, itself included; None = all before it
    groups: tuple[WorkGroup, ...]

    def first_seen(self, position: int) -> int:
        """The first position that the row at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)


@dataclass(frozen=True)
class _QueryTiles:
    """Columns over query tiles, sorted by num_kv_tiles descending."""

    request: Ints
    start: Ints  # position of the tile's row 0, a multiple of the tile size
    first: Ints  # positions of the first and last token it computes
    last: Ints
    num_kv_tiles: Ints  # from that of the first token that `first` sees to that of `last`
    token: Ints  # index in the batch of the token at position 0 of the request (may be negative)

    def __getitem__(self, part: slice | Ints) -> "_QueryTiles":
        return _QueryTiles(*(column[part] for column in vars(self).values()))


def attention_metadata(
    num_tokens: AnyInts,
    context_lens: AnyInts,
    block_tables: AnyInts,
    cache: KVCache,
    shape: TileShape,
    num_rows: int | None = None,
    window: int | None = None,
) -> AttentionMetadata:
    """The work of a batch whose tokens are packed request after request.

    num_tokens [R] > 0 tokens computed in this step; context_lens [R] tokens in the cache after it, these included;
    block_tables [R, P] block ids, enough for context_lens (what lies beyond is ignored); num_rows >= sum(num_tokens)
    rows of q, padding included; window: as AttentionMetadata's.
    """
    counts, lengths = num_tokens.astype(np.int64), context_lens.astype(np.int64)
    tables = block_tables.astype(np.int32, copy=False)
    total = int(counts.sum())
    num_rows = total if num_rows is None else num_rows
    # The largest query tile for long chunks, smaller ones where most of its rows would be padding.
    sizes = np.asarray(shape.query_tiles)
    tile_size = sizes[np.minimum(np.searchsorted(sizes[:-1] * 2, counts), len(sizes) - 1)]
    tile_size[counts == 1] = sizes[0]
    pieces = []
    for size in np.unique(tile_size).tolist():
        tiles = _query_tiles(np.flatnonzero(tile_size == size), counts, lengths, size, window)
        limit = _max_items(shape, shape.rows(size), cache)
        pieces += [(size, tiles[part]) for part in _parts(tiles.num_kv_tiles, limit)]
    groups = tuple(
        _work_group(tiles, size, tables, cache, shape, window, (total, num_rows) if len(pieces) == 1 else None)
        for size, tiles in pieces
    )
    return AttentionMetadata(shape, counts, lengths, tables, num_rows, window, groups)


def _query_tiles(requests: Ints, num_tokens: Ints, context_lens: Ints, size: int, window: int | None) -> _QueryTiles:
    start, end = (context_lens - num_tokens)[requests], context_lens[requests]
    first_token = (np.cumsum(num_tokens) - num_tokens)[requests]
    low = start // size
    count = (end - 1) // size - low + 1
    which = np.repeat(np.arange(len(requests)), count)
    number = low[which] + np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
    first, last = np.maximum(number * size, start[which]), np.minimum((number + 1) * size, end[which]) - 1
    seen = np.zeros_like(first) if window is None else np.maximum(first - window + 1, 0)
    tiles = _QueryTiles(
        request=requests[which],
        start=number * size,
        first=first,
        last=last,
        num_kv_tiles=last // KV_TILE - seen // KV_TILE + 1,
        token=(first_token - start)[which],
    )
    return tiles[np.argsort(-tiles.num_kv_tiles, kind="stable")]


def _max_items(shape: TileShape, rows: int, cache: KVCache) -> int:
    per_head = 2 * KV_TILE * shape.head_dim * (4 + cache.dtype.itemsize) + 4 * rows * (KV_TILE + 2 * shape.head_dim)
    return max(1, WORK_GROUP_BYTES // (per_head * shape.num_kv_heads))


def _parts(num_kv_tiles: Ints, max_items: int) -> list[slice]:
    """Cut query tiles into runs of at most max_items items; a tile with more is a run of its own."""
    parts, first, items = [], 0, 0
    for index, count in enumerate(num_kv_tiles.tolist()):
        if items and items + count > max_items:
            parts.append(slice(first, index))
            first, items = index, 0
        items += count
    return [*parts, slice(first, len(num_kv_tiles))]


def _work_group(
    tiles: _QueryTiles,
    size: int,
    block_tables: Int32s,
    cache: KVCache,
    shape: TileShape,
    window: int | None,
    whole: tuple[int, int] | None,
) -> WorkGroup:
    """whole = (tokens, rows) of the batch if this group computes all of it."""
    n, rows, num_kv_heads = len(tiles.request), shape.rows(size), shape.num_kv_heads
    max_tiles = int(tiles.num_kv_tiles[0])
    counts = np.count_nonzero(tiles.num_kv_tiles[:, None] > np.arange(max_tiles), axis=0)
    distance = np.repeat(np.arange(max_tiles), counts)
    query = np.arange(len(distance)) - (np.cumsum(counts) - counts)[distance]
    kv_tile = tiles.last[query] // KV_TILE - distance

    # Rows of the products: (token of the tile, query head of the KV head). Rows of no token repeat one that has one.
    row = np.minimum(np.arange(rows), size * shape.group_size - 1)
    positions = np.clip(tiles.start[:, None] + row // shape.group_size, tiles.first[:, None], tiles.last[:, None])
    heads = np.arange(num_kv_heads)[:, None] * shape.group_size + row % shape.group_size
    q_rows = (tiles.token[:, None] + positions)[:, None] * shape.num_heads + heads  # [n, Hkv, M]
    own = positions if size > 1 else positions[:, :1]
    mask, num_partial = _mask(own, query, kv_tile, n, window)

    out_tokens, out_rows = _output_rows(tiles, rows, shape)
    if whole is not None:
        num_tokens, num_rows = whole
        assert len(out_tokens) == num_tokens, f"query tiles hold {len(out_tokens)} tokens of {num_tokens}"
        out_rows = np.concatenate((out_rows, np.repeat(out_rows[:1], num_rows - num_tokens, axis=0)))
    return WorkGroup(
        query_tile=size,
        num_query_tiles=n,
        rows=rows,
        counts=tuple(counts.tolist()),
        item_query=torch.from_numpy(query),
        kv_rows=_kv_rows(tiles, query, kv_tile, block_tables, cache),
        tail_rows=_tail_rows(tiles, len(query), cache),
        q_rows=torch.from_numpy(q_rows[query].reshape(-1)),
        mask=torch.from_numpy(mask[:, None]),
        num_partial=num_partial,
        out_rows=torch.from_numpy(out_rows.reshape(-1)),
        out_tokens=None if whole is not None else torch.from_numpy(out_tokens),
    )


def _mask(own: Ints, query: Ints, kv_tile: Ints, n: int, window: int | None) -> tuple[Bools, int]:
    """own [n, M or 1] positions of the rows -> mask [m, M or 1, KV_TILE] of the first m items, and num_partial."""
    column = np.arange(KV_TILE)
    after = column > (own % KV_TILE)[:, :, None]
    if window is None:
        return after, n if own.shape[1] > 1 else 0
    begin = kv_tile * KV_TILE
    cut = np.flatnonzero(begin <= own[query].max(1) - window)  # items with a token that left some row's window
    num_cut = int(cut[-1]) + 1 if len(cut) else 0
    items = slice(max(num_cut, n))
    position, rows = begin[items, None, None] + column, own[query[items]][:, :, None]
    mask = (position > rows) | (position <= rows - window)
    return mask, max(num_cut, n if own.shape[1] > 1 else 0)


def _kv_rows(tiles: _QueryTiles, query: Ints, kv_tile: Ints, block_tables: Int32s, cache: KVCache) -> torch.Tensor:
    """Blocks wholly after the query tile's last token read the null block, which holds zeros."""
    per_tile = KV_TILE // cache.block_size
    index = kv_tile[:, None] * per_tile + np.arange(per_tile)  # [W, blocks per tile] in the request's table
    used = index <= (tiles.last // cache.block_size)[query][:, None]
    index = np.minimum(index, block_tables.shape[1] - 1)
    blocks = np.where(used, block_tables[tiles.request[query][:, None], index], 0).astype(np.int64)
    runs = blocks[:, None] * (2 * cache.num_kv_heads) + np.arange(cache.num_kv_heads)[:, None]  # [W, Hkv, blocks]
    return torch.from_numpy(np.stack((runs, runs + cache.num_kv_heads)).reshape(-1))


def _tail_rows(tiles: _QueryTiles, num_items: int, cache: KVCache) -> torch.Tensor:
    """Slots of a query tile's last block after its last token: not written yet, or not for it to see."""
    num_kv_heads = cache.num_kv_heads
    offset = (tiles.last // cache.block_size * cache.block_size % KV_TILE)[:, None] + np.arange(cache.block_size)
    item, column = np.nonzero(offset > (tiles.last % KV_TILE)[:, None])
    heads = np.arange(num_kv_heads)[:, None]
    keys = (item * num_kv_heads + heads) * KV_TILE + offset[item, column]
    return torch.from_numpy(np.concatenate((keys, keys + num_items * num_kv_heads * KV_TILE)).reshape(-1))


def _output_rows(tiles: _QueryTiles, rows: int, shape: TileShape) -> tuple[Ints, Ints]:
    """Tokens of these tiles, ascending, and for each its rows [t, H] of the result."""
    count = tiles.last - tiles.first + 1
    tile = np.repeat(np.arange(len(count)), count)
    position = tiles.first[tile] + np.arange(len(tile)) - np.repeat(np.cumsum(count) - count, count)
    head = np.arange(shape.num_heads)
    first_row = (position - tiles.start[tile]) * shape.group_size
    out = (tile[:, None] * shape.num_kv_heads + head // shape.group_size) * rows
    out += first_row[:, None] + head % shape.group_size
    tokens = tiles.token[tile] + position
    order = np.argsort(tokens)
    return tokens[order], out[order]
