"""DraftBlocks: the blocks of an executor's drafter: those of its rows, and spare ones for drafts after them."""

import numpy as np

from core.execution.runner_table import RunnerTable
from ipc.tables.arrays import Int32s, Ints
from ipc.tables.rounding import ceil_div


class DraftBlocks:
    """Block numbers in a drafter's cache: first those of the model's cache, then some for each row."""

    def __init__(self, num_rows: int, num_blocks: int, block_size: int, num_drafts: int) -> None:
        """num_blocks: of the model's cache. num_drafts: the most drafts per row."""
        self.block_size = block_size
        self._spare, self._first_spare = num_spare_blocks(1, num_drafts, block_size), num_blocks
        self.num_blocks = num_blocks + num_rows * self._spare

    def tables(self, rows: Ints, num_tokens: int, table: RunnerTable) -> Int32s:
        """Return the blocks [n, P] of the first num_tokens tokens of each row. A row's spare blocks follow its own."""
        width = ceil_div(num_tokens, self.block_size)
        beyond = np.arange(width) - table.num_blocks[rows][:, None]
        spare = self._first_spare + rows[:, None] * self._spare + np.minimum(beyond, self._spare - 1)
        return np.where(beyond >= 0, spare, table.block_tables(rows, width)).astype(np.int32)


def num_spare_blocks(num_rows: int, num_drafts: int, block_size: int) -> int:
    """Return how many extra blocks a drafter has: for each row, those for drafts after the row's blocks."""
    return num_rows * ceil_div(num_drafts + 1, block_size)
