"""AttentionPlan: a step's attention as the C kernel's work items, worked out once and used by every layer.

An item is some tokens of one request, for one KV head, against their context. Where few tokens have a long context,
each SPLIT of it is an item, so that threads share it; then a merge adds them up. None of this changes a bit of any
result (kernels/cpu/attention.h), so sizes are free to suit the machine.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.attention_metadata import AnyInts, Ints

#: Tokens; enum in attention.h.
TILE, SPLIT = 128, 512

#: Rows - tokens x query heads of a KV head - of an item: what they have so far stays in a core's second level cache.
MAX_ITEM_ROWS = 192

#: Items of no more rows than this are split along their context: their results cost less than what they read.
MAX_SPLIT_ROWS = 64

Int32s = NDArray[np.int32]


@dataclass(frozen=True)
class AttentionPlan:
    """One step's attention for the layers of one window."""

    num_tokens: Ints  # [R]
    context_lens: Ints  # [R]
    block_tables: Int32s  # [R, P]
    num_rows: int  # rows of q and of the output
    longest: int  # of context_lens
    window: int | None  # tokens that a row sees, itself included; None = all before it
    items: Int32s  # [I, 8] struct AttentionItem, the longest first
    merges: Int32s  # [M, 5] struct AttentionMerge
    num_partials: int  # rows of partial results
    max_item_tokens: int

    def first_seen(self, position: int) -> int:
        """The first position that the row at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)


def attention_plan(
    num_tokens: AnyInts,
    context_lens: AnyInts,
    block_tables: AnyInts,
    num_heads: int,
    num_kv_heads: int,
    window: int | None = None,
) -> AttentionPlan:
    """The work of a batch whose tokens are packed request after request; arguments as attention_metadata's."""
    counts, lengths = num_tokens.astype(np.int64), context_lens.astype(np.int64)
    group = num_heads // num_kv_heads
    pieces = _pieces(counts, lengths, max(1, MAX_ITEM_ROWS // group), window)
    items, merges, num_partials = _items(pieces, num_kv_heads, group)
    work = items[:, 3].astype(np.int64) * (items[:, 6] - items[:, 5])
    return AttentionPlan(
        num_tokens=counts,
        context_lens=lengths,
        block_tables=np.ascontiguousarray(block_tables, np.int32),
        num_rows=int(counts.sum()),
        longest=int(lengths.max(initial=0)),
        window=window,
        items=items[np.argsort(-work, kind="stable")],
        merges=merges,
        num_partials=num_partials,
        max_item_tokens=int(pieces.num_tokens.max(initial=0)),
    )


class _Pieces(NamedTuple):
    """Columns over pieces: the tokens of one request that one item computes."""

    request: Ints
    token: Ints  # index in the batch of the first one
    num_tokens: Ints
    position: Ints  # of the first one
    begin: Ints  # what they see of the context; begin is a multiple of TILE
    end: Ints


def _pieces(counts: Ints, lengths: Ints, size: int, window: int | None) -> _Pieces:
    num_pieces = -(-counts // size)
    request = np.repeat(np.arange(len(counts)), num_pieces)
    offset = _count_up(num_pieces) * size
    num_tokens = np.minimum(size, counts[request] - offset)
    position = (lengths - counts)[request] + offset
    begin = np.zeros_like(position) if window is None else np.maximum(position - window + 1, 0) // TILE * TILE
    token = (np.cumsum(counts) - counts)[request] + offset
    return _Pieces(request, token, num_tokens, position, begin, position + num_tokens)


def _items(pieces: _Pieces, num_kv_heads: int, group: int) -> tuple[Int32s, Int32s, int]:
    """Items, merges, and the number of rows of partial results, which are ordered [head][piece][part][row]."""
    first, rows = pieces.begin // SPLIT, pieces.num_tokens * group
    num_parts = np.where(rows <= MAX_SPLIT_ROWS, (pieces.end - 1) // SPLIT - first + 1, 1)
    is_split = num_parts > 1
    num_partials = np.where(is_split, num_parts * rows, 0)
    partial, total = np.cumsum(num_partials) - num_partials, int(num_partials.sum())
    heads = np.arange(num_kv_heads)

    piece, part = np.repeat(np.arange(len(rows)), num_parts), _count_up(num_parts)
    low = np.where(is_split, first * SPLIT, pieces.begin)[piece] + part * SPLIT
    begin = np.maximum(low, pieces.begin[piece])
    end = np.where(is_split[piece], np.minimum(low + SPLIT, pieces.end[piece]), pieces.end[piece])
    items = np.empty((len(piece), num_kv_heads, 8), np.int32)
    items[:, :, 1] = heads
    columns = (pieces.request[piece], pieces.token[piece], pieces.num_tokens[piece], pieces.position[piece], begin, end)
    for index, column in zip((0, 2, 3, 4, 5, 6), columns, strict=True):
        items[:, :, index] = column[:, None]
    own = (partial[piece] + part * rows[piece])[:, None] + heads * total
    items[:, :, 7] = np.where(is_split[piece][:, None], own, -1)

    split = np.flatnonzero(is_split)
    merges = np.empty((len(split), num_kv_heads, 5), np.int32)
    merges[:, :, 0] = heads
    for index, column in zip((1, 2, 4), (pieces.token, pieces.num_tokens, num_parts), strict=True):
        merges[:, :, index] = column[split][:, None]
    merges[:, :, 3] = partial[split][:, None] + heads * total
    return items.reshape(-1, 8), merges.reshape(-1, 5), total * num_kv_heads


def _count_up(counts: Ints) -> Ints:
    """0 .. count - 1 for each count, one after the other."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
