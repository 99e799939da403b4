"""AttentionPlan: a step's attention as the C kernel's work items, worked out once and used by every layer.

An item is some tokens of one request, for one KV head, against their context. Where few tokens have a long context,
each SPLIT of it is an item, so that threads share it; then a merge adds them up. None of this changes a bit of any
result (kernels/cpu/attention.h), so sizes are free to suit the machine.
"""

from dataclasses import dataclass

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
    size = max(1, MAX_ITEM_ROWS // group)

    # Pieces: up to `size` tokens of a request.
    num_pieces = -(-counts // size)
    request = np.repeat(np.arange(len(counts)), num_pieces)
    offset = _count_up(num_pieces) * size
    token = (np.cumsum(counts) - counts)[request] + offset
    tokens = np.minimum(size, counts[request] - offset)
    position = (lengths - counts)[request] + offset
    end = position + tokens
    begin = (np.zeros_like(end) if window is None else np.maximum(position - window + 1, 0)) // TILE * TILE

    # Parts of their contexts, and the partial results: [head][piece][part][row].
    first = begin // SPLIT
    num_parts = np.where(tokens * group <= MAX_SPLIT_ROWS, (end - 1) // SPLIT - first + 1, 1)
    piece, part = np.repeat(np.arange(len(request)), num_parts), _count_up(num_parts)
    is_split = num_parts[piece] > 1
    part_begin = np.where(is_split, np.maximum(begin[piece], (first[piece] + part) * SPLIT), begin[piece])
    part_end = np.where(is_split, np.minimum(end[piece], (first[piece] + part + 1) * SPLIT), end[piece])
    rows = np.where(num_parts > 1, num_parts * tokens * group, 0)
    total = int(rows.sum())
    partial = np.cumsum(rows) - rows
    own = partial[piece] + part * tokens[piece] * group

    heads = np.arange(num_kv_heads)
    columns = (request[piece], heads, token[piece], tokens[piece], position[piece], part_begin, part_end)
    items = _table(*columns, np.where(is_split, own, -1))
    items[:, :, 7] += np.where(is_split[:, None], heads * total, 0)
    items = items.reshape(-1, 8)
    work = items[:, 3].astype(np.int64) * (items[:, 6] - items[:, 5])
    split = np.flatnonzero(num_parts > 1)
    merges = _table(heads, token[split], tokens[split], partial[split], num_parts[split])
    merges[:, :, 3] += heads * total
    return AttentionPlan(
        num_tokens=counts,
        context_lens=lengths,
        block_tables=np.ascontiguousarray(block_tables, np.int32),
        num_rows=int(counts.sum()),
        window=window,
        items=np.ascontiguousarray(items[np.argsort(-work, kind="stable")]),
        merges=np.ascontiguousarray(merges.reshape(-1, 5)),
        num_partials=total * num_kv_heads,
        max_item_tokens=int(tokens.max(initial=0)),
    )


def _count_up(counts: Ints) -> Ints:
    """0 .. count - 1 for each count, one after the other."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def _table(*columns: Ints) -> Int32s:
    """Columns over pieces [n], and the one over heads [Hkv] -> [n, Hkv, columns]; heads are the first or the second."""
    heads = 1 if len(columns) == 8 else 0
    table = np.empty((len(columns[-1]), len(columns[heads]), len(columns)), np.int32)
    for index, column in enumerate(columns):
        table[:, :, index] = column if index == heads else column[:, None]
    return table
