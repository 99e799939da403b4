"""WindowTable: the rows' blocks in layers with a window, where these layers have blocks of their own."""

import numpy as np

from core.batch.table import BLOCKS_PER_PAGE
from ipc.tables.arrays import BlockIds, Int32s, Ints, Rows
from ipc.tables.columns import Columns, column
from ipc.tables.paged_rows import PagedRows


class WindowTable(Columns):
    """Block tables beside those of the batch table, under the same row numbers.

    A block has the number of its page's first block (core/models/layers/cache_pages.py).
    """

    num_blocks: Ints = column()  # places in the row's table; those that the window has passed are empty
    num_released: Ints = column()  # of num_blocks: the first ones, which the row has given back or never had

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self.blocks = PagedRows(num_rows, BLOCKS_PER_PAGE)

    def add(self, rows: Rows, num_passed: list[int], blocks: list[Int32s]) -> None:
        """Give rows that start their blocks; the first num_passed[i] places of rows[i] are empty."""
        self.num_blocks[rows], self.num_released[rows] = list(map(len, blocks)), num_passed
        self.blocks.fill(rows, blocks)

    def append(self, rows: Rows, counts: Ints, block_ids: BlockIds) -> Rows:
        """Append counts[i] > 0 blocks of block_ids, in order, to rows[i], and return the row of each block."""
        starts = self.num_blocks[rows]
        self.blocks.ensure(rows, starts + counts)
        self.num_blocks[rows] += counts
        self.blocks.set_runs(rows, starts, counts, block_ids)
        return rows.repeat(counts)

    def block_ids(self, row: int) -> Int32s:
        """Return the blocks that the row has, in the order of its tokens."""
        return self.blocks.read(row, int(self.num_released[row]), int(self.num_blocks[row]))

    def remove(self, rows: Rows) -> None:
        """Forget the tables of these rows."""
        self.blocks.clear_all(rows)
        self.num_blocks[rows] = self.num_released[rows] = 0

    def check_integrity(self, running: Ints) -> None:
        """Check the columns. Errors: AssertionError with the numbers."""
        self.check_columns()
        held, released = self.num_blocks[running], self.num_released[running]
        assert (released <= held).all(), f"{released} of {held} blocks are given back"
        idle = np.ones(len(self.num_blocks), np.bool_)
        idle[running] = False
        assert not self.num_blocks[idle].any(), "a free row has blocks"
