"""RunnerTable: the executor's mirror of the batch table, built from plans alone."""

from collections.abc import Sequence

import numpy as np

from core.execution.plan import NewPooling, NewRow, SchedulerOutput
from ipc.tables.arrays import AnyInts, Bools, Int32s, Ints, Rows, TokenIds
from ipc.tables.columns import Columns, column
from ipc.tables.paged_rows import PagedRows

TOKENS_PER_PAGE = 256
BLOCKS_PER_PAGE = 64


class RunnerBlocks(Columns):
    """The rows' blocks in one kind of layer. 0 stands for tokens that the window of a further kind has passed."""

    num_blocks: Ints = column()

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self.blocks = PagedRows(num_rows, BLOCKS_PER_PAGE)

    def append_blocks(self, owned_by: Int32s, block_ids: Int32s) -> None:
        """Append block_ids[i] to row owned_by[i]. Entries of one row are adjacent."""
        rows = owned_by.astype(np.int64)
        places = self.num_blocks[rows]
        owners, lengths = rows, places + 1
        if np.count_nonzero(rows[1:] == rows[:-1]):  # some get several
            first = np.flatnonzero(np.diff(rows, prepend=-1))
            places += np.arange(len(rows)) - np.repeat(first, np.diff(first, append=len(rows)))
            last = np.append(first[1:], len(rows)) - 1
            owners, lengths = rows[last], places[last] + 1
        self.blocks.ensure(owners, lengths)
        self.blocks.set(rows, places, block_ids)
        self.num_blocks[owners] = lengths

    def block_tables(self, rows: Rows, width: int) -> Int32s:
        """Return the first `width` blocks of each row, [R, width]. A row that has fewer repeats its last one."""
        columns = np.minimum(np.arange(width), self.num_blocks[rows, None] - 1)
        return self.blocks.get(rows[:, None], columns)


class RunnerTable(RunnerBlocks):
    """The rows of the batch, with the scheduler's row numbers, as of the last step that this executor has started.

    The columns mean the same as in the batch table. Sampled tokens are appended without waiting for the scheduler.
    """

    num_tokens: Ints = column()
    num_prompt_tokens: Ints = column()
    num_computed_tokens: Ints = column()
    pools: Ints = column()  # 0 or 1: the row's output is vectors, and it samples nothing

    def __init__(self, num_rows: int, block_size: int, num_others: int = 0) -> None:
        """num_others: number of further kinds of layers (core/models/layers/cache_pages.py); plans may have more."""
        super().__init__(num_rows)
        self.block_size = block_size
        self._has_pooled = False  # whether any row has pooled so far
        self.tokens = PagedRows(num_rows, TOKENS_PER_PAGE)
        self.others = [RunnerBlocks(num_rows) for _ in range(num_others)]

    def apply(self, plan: SchedulerOutput) -> None:
        """Apply the plan's removed rows, added rows and new blocks. advance() counts the batch's tokens."""
        if len(plan.removed_rows):
            self.tokens.clear_all(plan.removed_rows)
            self.blocks.clear_all(plan.removed_rows)
            for other in self.others:
                other.blocks.clear_all(plan.removed_rows)
                other.num_blocks[plan.removed_rows] = 0
        if starts := plan.starts:
            self._add(starts)
        self._has_pooled |= bool(plan.added_pooling)
        if len(plan.block_rows):
            self.append_blocks(plan.block_rows, plan.block_ids)
        for number, new in enumerate(plan.others):
            if number == len(self.others):
                self.others.append(RunnerBlocks(self.num_column_rows))
            if len(new.rows):
                self.others[number].append_blocks(new.rows, new.ids)

    def _add(self, added: Sequence[NewRow | NewPooling]) -> None:
        rows = np.array([new.row for new in added])
        entries = list[int]()
        for new in added:  # in the order of the columns
            sizes = len(new.block_ids), len(new.token_ids), new.num_prompt_tokens, new.num_computed_tokens
            entries += (*sizes, isinstance(new, NewPooling))
        self.set_columns(rows, entries)
        self.tokens.fill(rows, [new.token_ids for new in added])
        self.blocks.fill(rows, [new.block_ids for new in added])

    def advance(self, plan: SchedulerOutput) -> Bools:
        """Count the batch's tokens as computed, and return which rows sample in this step, bool [R].

        A row samples if all its known tokens are computed and it does not pool. Drafts are not counted; see accept().
        """
        rows = plan.rows
        ends = self.num_computed_tokens[rows] + plan.num_scheduled_tokens
        known, capacity = self.num_tokens[rows], self.num_blocks[rows] * self.block_size
        assert not np.count_nonzero(ends > capacity), f"scheduled up to {ends} tokens, but the blocks hold {capacity}"
        if len(plan.num_draft_tokens):
            ends -= plan.num_draft_tokens
        assert not np.count_nonzero(ends > known), f"scheduled up to {ends} tokens, but {known} are known"
        self.num_computed_tokens[rows] = ends
        samples: Bools = ends == known
        if self._has_pooled:
            samples &= self.pools[rows] == 0
        return samples

    def write_drafts(self, rows: Rows, token_ids: TokenIds, counts: Ints) -> None:
        """Write counts[i] draft tokens of rows[i], row after row, after the row's tokens, without counting them."""
        lengths = self.num_tokens[rows]
        self.tokens.ensure(rows, lengths + counts)
        self.tokens.set_runs(rows, lengths, counts, token_ids)

    def accept(self, plan: SchedulerOutput, counts: AnyInts) -> None:
        """Count the accepted drafts of a step's rows as computed. counts [R]: number of tokens that each row yields."""
        if len(plan.num_draft_tokens):
            self.num_computed_tokens[plan.rows] += np.where(plan.num_draft_tokens > 0, np.maximum(counts - 1, 0), 0)

    def append_tokens(self, rows: Rows, token_ids: TokenIds, counts: Ints | None = None) -> None:
        """Append one sampled token to each of these rows, or counts[i] tokens, given row after row."""
        lengths = self.num_tokens[rows]
        if counts is not None:
            self.tokens.ensure(rows, lengths + counts)
            self.tokens.set_runs(rows, lengths, counts, token_ids)
            self.num_tokens[rows] += counts
            return
        self.tokens.ensure(rows, lengths + 1)
        self.tokens.set(rows, lengths, token_ids)
        self.num_tokens[rows] += 1
