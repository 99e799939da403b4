"""HeadDrafter: drafts from a draft head (core/models/draft_head.py) that reads the model's hidden states.

A step's hidden states are lost after it, and the head needs its K and V for all tokens that have a next one. They are
stored in blocks with the same numbers as the model's blocks, and are copied and swapped with these. A step without
drafts keeps its hidden states, and K and V are computed for many tokens at once: before the next drafts, before the
blocks are copied or given to other rows, or when there are _PIECE tokens.
If requests share a block, K and V at its last position may come from another request's next token. That may cost a
draft, but never changes a token.
"""

from typing import NamedTuple

import numpy as np

from core.execution.plan import SchedulerOutput
from core.execution.runner_table import RunnerTable
from core.models.draft_head import DraftHead
from core.models.operations.tensor import Tensor
from core.runner.draft_blocks import DraftBlocks
from core.runner.draft_chain import NextLogits, draw_chain, num_drawn
from core.runner.draft_pause import DraftPause
from core.runner.drafter import RanStep, StepStates, kept_tokens
from core.sampling.columns import SamplingColumns
from ipc.tables.arrays import NO_INT32S, Int32s, Ints
from kernels.memory.kv_cache import KVCache

#: The most tokens whose K and V are computed at once: it bounds the memory for hidden states.
_PIECE = 256


def with_head(layout: str, cache: KVCache) -> str:
    """Return the layout of blocks that have a head's K and V too. layout: without them. cache: the head's."""
    return f"{layout} draft head: {cache.layout}"


class _Late(NamedTuple):
    """Tokens [T] of a step whose K and V are not computed yet, with what the model gave before them."""

    token_ids: Ints
    taps: Tensor  # of StepStates.of_tokens()
    positions: Ints  # of the states before them
    slots: Ints


class HeadDrafter:
    """A draft head and the cache of its K and V, by the numbers of the model's blocks, and that of blocks on the host.

    head: may be replaced by one for other weights of the model.
    """

    def __init__(
        self,
        head: DraftHead,
        *,
        num_rows: int,
        num_blocks: int,
        block_size: int,
        num_drafts: int,
        num_swap_blocks: int = 0,
        is_late: bool = True,
    ) -> None:
        """Allocate the caches. num_drafts: the most drafts per row. Errors: MemoryError.

        is_late: K and V may be computed steps later. If not, whole blocks can be read between steps.
        """
        self.head, self._block_size, self._num_drafts = head, block_size, num_drafts
        self._placing = DraftBlocks(num_rows, num_blocks, block_size, num_drafts)
        self.cache = head.allocate_cache(self._placing.num_blocks, block_size)
        self.swap_cache = head.allocate_swap_cache(num_swap_blocks, block_size) if num_swap_blocks else None
        self._pause, self._is_late = DraftPause(), is_late
        self._late: list[_Late] = []
        self._num_late = 0  # tokens

    def apply(self, plan: SchedulerOutput) -> None:
        """Copy the blocks that the plan copies, in the plan's order."""
        copied = plan.swapped_out_blocks, plan.copied_blocks, plan.swapped_in_slots
        if self._late and (len(plan.removed_rows) or any(map(len, copied))):
            self._store_late()
        if self.swap_cache is not None:
            self.cache.copy_blocks(plan.swapped_out_blocks, self.swap_cache, plan.swapped_out_slots)
        if len(plan.copied_blocks):
            self.cache.copy_blocks(plan.copied_blocks, self.cache, plan.copied_to)
        if self.swap_cache is not None:
            self.swap_cache.copy_blocks(plan.swapped_in_slots, self.cache, plan.swapped_in_blocks)

    def propose(self, step: RanStep, table: RunnerTable, sampling: SamplingColumns) -> tuple[Int32s, Int32s]:
        """Return (counts [R], token ids, row after row) of drafts for the rows that have sampled in this step."""
        inputs = step.states
        assert inputs is not None, "a head reads the model's states"
        rows = inputs.rows
        counts = np.zeros(len(rows), np.int32)
        known = table.num_tokens[rows]
        starts, num_kept, drafts = kept_tokens(inputs, table, self.head.max_model_len)
        if self._pause.begins(step.plan):
            drafts[:] = False
        drafting = np.flatnonzero(drafts)
        first = inputs.num_tokens.cumsum() - inputs.num_tokens
        ends_block = self._keep(inputs, table, starts, first, num_kept - drafts)
        if self._late and (len(drafting) or (ends_block and not self._is_late)):
            self._store_late()
        self._pause.offer(bool(len(drafting)))
        if not len(drafting):
            return counts, NO_INT32S
        taps = inputs.of_tokens((first + num_kept - 1)[drafting])
        token_ids = self._chain(rows[drafting], known[drafting], self.head.states(taps), table, sampling)
        most = np.minimum(self._num_drafts, self.head.max_model_len - known[drafting] + 2)
        counts[drafting] = np.minimum(most, num_drawn(token_ids))
        return counts, token_ids[np.arange(self._num_drafts) < counts[drafting][:, None]]

    def step(self, rows: Ints, table: RunnerTable, sampling: SamplingColumns) -> None:
        """Run one round of single-token drafts with meaningless contents, to measure it."""
        self._chain(rows, np.full(len(rows), 2), self.head.trial_states(len(rows)), table, sampling)

    def _keep(self, inputs: StepStates, table: RunnerTable, starts: Ints, first: Ints, num_stored: Ints) -> bool:
        """Keep what K and V of num_stored [R] tokens of each row of the step are computed from.

        starts, first [R]: position of the first one, and its index in the step. Return whether a block ends with one.
        """
        num_all = int(num_stored.sum())
        if not num_all:
            return False
        owners = np.arange(len(num_stored)).repeat(num_stored)
        places = np.arange(num_all) - (num_stored.cumsum() - num_stored).repeat(num_stored)
        positions, indices = starts[owners] + places, first[owners] + places
        rows = inputs.rows[owners]
        token_ids = table.tokens.get(rows, positions + 1).astype(np.int64)
        for begin in range(0, num_all, _PIECE):
            part = slice(begin, begin + _PIECE)
            taps, slots = inputs.of_tokens(indices[part]), inputs.slots[indices[part]]
            self._late.append(_Late(token_ids[part], taps, positions[part], slots))
            self._num_late += len(slots)
            if self._num_late >= _PIECE:
                self._store_late()
        return bool(((positions + 1) % self._block_size == 0).any())

    def _store_late(self) -> None:
        """Compute and store K and V of all tokens that wait for it."""
        late, self._late, self._num_late = self._late, [], 0
        states = self.head.states(*(each.taps for each in late))
        token_ids, positions, slots = (
            np.concatenate(column)
            for column in zip(*((each.token_ids, each.positions, each.slots) for each in late), strict=True)
        )
        self.head.store(token_ids, states, positions, slots, self.cache)

    def _chain(
        self, rows: Ints, lengths: Ints, states: Tensor, table: RunnerTable, sampling: SamplingColumns
    ) -> Int32s:
        """Return drafts [n, num_drafts] that follow lengths [n] tokens of rows [n]; negative after the last one.

        states [n, hidden]: after the second-to-last tokens.
        """
        last = self.head.max_model_len - 1
        tables = self._placing.tables(rows, int(lengths.max()) + self._num_drafts - 1, table)

        def go_on(index: int, tokens: Ints) -> NextLogits:
            nonlocal states
            positions = np.minimum(lengths - 2 + index, last)
            logits, states = self.head.forward(tokens, states, positions, tables, self.cache)
            return NextLogits(logits)

        tokens = table.tokens.get(rows, lengths - 1).astype(np.int64)
        first = go_on(0, tokens)
        return draw_chain(rows, self._num_drafts, first, go_on, table, sampling, self.head.sampler)
