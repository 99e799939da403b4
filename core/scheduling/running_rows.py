"""RunningRows: gives running rows their next tokens and the blocks for them."""

import numpy as np

from core.scheduling.decisions import Cause
from core.scheduling.draft import Draft
from core.scheduling.parts import SchedulerParts
from core.scheduling.preemption import Preemption
from ipc.options.workers import most_in_flight
from ipc.tables.arrays import Ints, Rows
from ipc.tables.rounding import ceil_div

_NO_BUDGET = 2**62  # more tokens than rows can want


class RunningRows:
    """Serves running rows, in the policy's order.

    A row that lacks blocks takes them from rows served after it, by preemption. If none of these may be preempted, the
    row and those after it keep their blocks and get only as many tokens as these blocks can hold. So the row waits, and
    the budget goes to rows that will free blocks when they end.
    """

    def __init__(self, parts: SchedulerParts, preemption: Preemption) -> None:
        self._batch, self._waiting, self._policy = parts.batch, parts.waiting, parts.policy
        self._preemption = preemption
        self._long_prefill = parts.config.long_prefill_token_threshold

    def fill(self, draft: Draft) -> None:
        """Give every running row its tokens out of the draft's budget, and allocate the blocks for them."""
        batch, pool = self._batch, self._batch.pool
        rows = batch.rows
        counts, num_tokens, needs, num_needed = self._demand(rows, draft.budget)
        if num_needed > pool.num_free or num_tokens == draft.budget:  # the order matters only if something is short
            rows = self._policy.in_order(rows)
            counts, num_tokens, needs, num_needed = self._demand(rows, draft.budget)
        while num_needed > pool.num_free + pool.num_fenced:
            victim = self._victim(rows, needs)
            if victim is None:
                break
            self._preemption.preempt(draft, victim, Cause.OLDER)
            rows = rows[rows != victim]
            counts, num_tokens, needs, num_needed = self._demand(rows, draft.budget)
        if num_needed > pool.num_free:  # more blocks are freed when fences lift or rows end
            wanted = counts
            counts, num_tokens, needs, num_needed = self._demand(rows, draft.budget, self._first_short(needs))
            draft.num_skipped += int(np.count_nonzero((wanted > 0) & (counts == 0)))
        if num_needed:
            growing = needs > 0
            batch.grow(draft.blocks, rows[growing], needs[growing], counts[growing])
        draft.rows, draft.counts = rows, counts
        draft.budget -= num_tokens

    def num_wanting(self) -> int:
        """Return how many running rows could take tokens now."""
        return int(np.count_nonzero(self._demand(self._batch.rows, _NO_BUDGET)[0]))

    def _demand(self, rows: Rows, budget: int, num_growing: int | None = None) -> tuple[Ints, int, Ints, int]:
        """Return each row's tokens [n], cut at the budget, and their sum; the blocks it lacks [n], and their sum.

        num_growing: only the first num_growing rows may lack blocks; None means all rows.
        """
        table = self._batch.table
        placeholders = table.num_placeholders[rows]
        known = table.num_tokens[rows] + placeholders
        computed = table.num_computed_tokens[rows]
        wanted = known - computed
        if self._long_prefill and len(rows) + len(self._waiting) > 1:
            np.minimum(wanted, self._long_prefill, out=wanted)
        if num_growing is not None:
            held = rows[num_growing:]
            room = self._batch.room_of(held) - table.num_computed_tokens[held]
            np.minimum(wanted[num_growing:], room, out=wanted[num_growing:])
        self._leave_out(rows, wanted, known, placeholders)
        num_wanted = int(wanted.sum())
        if num_wanted > budget:
            wanted, num_wanted = np.clip(budget - (np.cumsum(wanted) - wanted), 0, wanted), budget
        needs = self._batch.lacking(rows, computed + wanted)
        return wanted, num_wanted, needs, int(needs.sum())

    def _leave_out(self, rows: Rows, wanted: Ints, known: Ints, placeholders: Ints) -> None:
        """Set to 0 the tokens `wanted` [n] of rows that this step leaves out.

        known [n]: tokens of the rows, including the placeholders [n].
        """
        # A row whose last token is being sampled by a step in flight has nothing left to compute.
        if np.count_nonzero(placeholders):
            wanted[(known >= self._batch.table.max_total_tokens[rows]) & (placeholders > 0)] = 0

    def _first_short(self, needs: Ints) -> int:
        """Return the index of the first row for which the free blocks do not suffice."""
        return int(np.argmax(np.cumsum(needs) > self._batch.pool.num_free))

    def _victim(self, rows: Rows, needs: Ints) -> int | None:
        """Choose the row to preempt for the first row that lacks blocks; None if there is none.

        Candidates are the rows served after it. A row of the same level that holds all the blocks it can ever need is
        spared: it will finish and free them.
        """
        table = self._batch.table
        short = self._first_short(needs)
        later = rows[short + 1 :]
        sure = self._batch.has_all_blocks(later)
        candidates = later[~(sure & (table.level[later] == table.level[rows[short]]))]
        if not len(candidates):
            return None
        return int(self._preemption.victims_first(candidates)[0])


# RowsInTurn: serves running rows if several steps are in flight, each with different rows.


class RowsInTurn(RunningRows):
    """Serves running rows in the stages of a pipeline.

    The first stage needs a row's last token, which the last stage samples. So a row gets nothing while a step in flight
    samples its next token, and each step takes only its share of the decoding rows, so that the other steps have some
    too. The chunks of a prompt need no sampled token, so they follow one another without a gap.
    """

    def __init__(self, parts: SchedulerParts, preemption: Preemption) -> None:
        super().__init__(parts, preemption)
        self._num_steps = most_in_flight(parts.config)

    def _leave_out(self, rows: Rows, wanted: Ints, known: Ints, placeholders: Ints) -> None:
        wanted[placeholders > 0] = 0
        decoding = np.flatnonzero(wanted == 1)  # and not held up by lack of blocks: otherwise no row might get a turn
        wanted[decoding[ceil_div(len(rows), self._num_steps) :]] = 0


def running_rows(parts: SchedulerParts, preemption: Preemption) -> RunningRows:
    """Return the RunningRows or RowsInTurn that this config needs."""
    kind = RunningRows if parts.config.pipeline_parallel_size == 1 else RowsInTurn
    return kind(parts, preemption)
