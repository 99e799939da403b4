"""BlockTable: the blocks of rows in one kind of layer."""

from typing import NamedTuple

import numpy as np

from core.kv.cache_kinds import CacheKind
from ipc.tables.arrays import BlockIds, Int32s, Ints, Rows
from ipc.tables.columns import Columns, column
from ipc.tables.paged_rows import PagedRows

BLOCKS_PER_PAGE = 64


class BlockTable(Columns):
    """Each row's blocks, in the order of its tokens.

    A block of a kind other than the first has the number of its page's first block (core/models/layers/cache_pages.py).
    """

    num_blocks: Ints = column()  # number of entries in the row's table
    num_released: Ints = column()  # of num_blocks: how many of the first the row has freed or never had

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self.blocks = PagedRows(num_rows, BLOCKS_PER_PAGE)

    def block_ids(self, row: int) -> Int32s:
        """Return the row's KV blocks [num_blocks - num_released], in the order of its tokens."""
        return self.blocks.read(row, int(self.num_released[row]), int(self.num_blocks[row]))

    def append_blocks(self, rows: Rows, counts: Ints, block_ids: BlockIds) -> Rows:
        """Append counts[i] > 0 blocks of block_ids, in order, to rows[i], and return the row of each block."""
        starts = self.num_blocks[rows]
        self.blocks.ensure(rows, starts + counts)
        self.num_blocks[rows] += counts
        if len(rows) < len(block_ids):  # some get several
            first = counts.cumsum() - counts
            starts = np.repeat(starts - first, counts) + np.arange(len(block_ids))
            rows = rows.repeat(counts)
        self.blocks.set(rows, starts, block_ids)
        return rows

    def begin_rows(self, rows: Rows, num_released: list[int], blocks: list[Int32s]) -> None:
        """Give starting rows their blocks. The first num_released[i] entries of rows[i] are empty."""
        self.num_blocks[rows], self.num_released[rows] = list(map(len, blocks)), num_released
        self.blocks.fill(rows, blocks)

    def end_rows(self, rows: Rows) -> None:
        """Forget the blocks of these rows."""
        self.blocks.clear_all(rows)
        self.num_blocks[rows] = self.num_released[rows] = 0

    def check_blocks(self, running: Ints) -> None:
        """Check that only running rows have blocks. Errors: AssertionError with the numbers."""
        self.check_columns()
        held, released = self.num_blocks[running], self.num_released[running]
        assert (released <= held).all(), f"rows {running} have given back {released} of {held} blocks"
        idle = np.ones(len(self.num_blocks), np.bool_)
        idle[running] = False
        assert not self.num_blocks[idle].any(), "a free row has blocks"


class OtherKind(NamedTuple):
    """A further kind of layer, which has a window."""

    number: int
    kind: CacheKind
    table: BlockTable  # the table of all rows
