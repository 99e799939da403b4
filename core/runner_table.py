"""RunnerTable: the executor's own mirror of the batch table, learned from plans alone."""

import numpy as np
import numpy.typing as npt

from core.plan import NewRow, SchedulerOutput
from ipc.paged_rows import Int32s, Ints, PagedRows

TOKENS_PER_PAGE = 256
BLOCKS_PER_PAGE = 64


class RunnerTable:
    """Rows have the scheduler's numbers; sampled tokens are appended here without waiting for the scheduler.

    num_tokens, num_prompt_tokens, num_computed_tokens, num_blocks [rows] int64: as in the batch table, of the steps
    that this executor has begun.
    """

    def __init__(self, num_rows: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_tokens = np.zeros(num_rows, np.int64)
        self.num_prompt_tokens = np.zeros(num_rows, np.int64)
        self.num_computed_tokens = np.zeros(num_rows, np.int64)
        self.num_blocks = np.zeros(num_rows, np.int64)
        self.tokens = PagedRows(num_rows, TOKENS_PER_PAGE)
        self.blocks = PagedRows(num_rows, BLOCKS_PER_PAGE)

    def apply(self, plan: SchedulerOutput) -> None:
        """Take in the plan's changes; the batch itself is left to advance()."""
        for row in plan.removed_rows.tolist():
            self.tokens.clear(row)
            self.blocks.clear(row)
        for new in plan.added:
            self._add(new)
        rows = plan.block_rows
        if len(rows):
            first = np.flatnonzero(np.diff(rows, prepend=-1))  # the blocks of one row stand together
            counts = np.diff(first, append=len(rows))
            starts = self.num_blocks[rows[first]]
            self.blocks.ensure(rows[first], starts + counts)
            offsets = np.arange(len(rows)) - np.repeat(first, counts)
            self.blocks.set(rows, np.repeat(starts, counts) + offsets, plan.block_ids)
            self.num_blocks[rows[first]] += counts

    def _add(self, new: NewRow) -> None:
        row = new.row
        self.num_tokens[row] = len(new.token_ids)
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.num_computed_tokens[row] = new.num_computed_tokens
        self.num_blocks[row] = len(new.block_ids)
        self.tokens.extend(row, 0, new.token_ids)
        self.blocks.extend(row, 0, new.block_ids)

    def advance(self, plan: SchedulerOutput) -> npt.NDArray[np.bool_]:
        """Count the batch's tokens as computed; True for the rows [R] that sample a token in this step."""
        rows = plan.rows
        ends = self.num_computed_tokens[rows] + plan.num_scheduled_tokens
        known, capacity = self.num_tokens[rows], self.num_blocks[rows] * self.block_size
        assert not np.count_nonzero(ends > known), f"scheduled up to {ends} of {known} tokens"
        assert not np.count_nonzero(ends > capacity), f"scheduled up to {ends} tokens on blocks for {capacity}"
        self.num_computed_tokens[rows] = ends
        samples: npt.NDArray[np.bool_] = ends == known
        return samples

    def block_tables(self, rows: Ints, width: int) -> Int32s:
        """The first `width` blocks of each row [R, width]; a row that has fewer repeats its last one."""
        columns = np.minimum(np.arange(width), self.num_blocks[rows, None] - 1)
        return self.blocks.get(rows[:, None], columns)

    def append_tokens(self, rows: Ints, token_ids: Int32s) -> None:
        """One sampled token for each of these rows."""
        lengths = self.num_tokens[rows]
        self.tokens.ensure(rows, lengths + 1)
        self.tokens.set(rows, lengths, token_ids)
        self.num_tokens[rows] += 1
