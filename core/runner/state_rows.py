"""RowStates: where the recurrent states of the batch's rows, of kept states and of a step's drafts are stored.

A row's state is a function of the tokens that the row has computed. It needs no allocation: each row has a slot, and
the kernels start with zeros at position 0. A request that starts at a later position gets a copy of a kept state.

A step with drafts also stores the state before each draft, in spare slots. If a draft is wrong, the row continues with
the state before it: the row and the spare swap slots, so nothing is copied or recomputed.
"""

from typing import NamedTuple

import numpy as np

from core.execution.plan import SchedulerOutput
from core.models.operations.tensor import Tensor
from core.models.step import ONCE
from core.runner.step_inputs import StepInputs
from ipc.tables.arrays import AnyInts, Bools, Ints
from kernels.recurrence import StateRows


class DraftStates(NamedTuple):
    """Where a step with drafts stores the states before them, until accept()."""

    rows: Ints  # [r] the rows that sample
    in_plan: Ints  # [r] their indices in the plan
    begins: Ints  # [r] index of each row's first sample
    saved: Ints  # [S] where the state before the draft after each sample is stored; -1: no draft


class RowStates:
    """The states of all rows, and slots for others."""

    def __init__(self, states: Tensor, num_spare: int = 0, *, swapped: Tensor | None = None) -> None:
        """states [rows, slots and spare slots, numbers] float32, on the host or a device.

        num_spare: the most drafts in all steps whose tokens are not known yet. swapped [slots, numbers]: those of
        swapped requests, which follow those of rows and slots in plans, if they are elsewhere.
        """
        self.states, self._swapped = states, swapped
        self.places: Ints = np.arange(len(states) - num_spare)  # where the states of rows and slots are stored
        self._spare: Ints = np.arange(len(states) - num_spare, len(states))  # of no step
        self.num_spare = num_spare  # 0: no step may have drafts
        self.drafted: DraftStates | None = None  # of the last step with drafts
        self._last: tuple[int, StateRows | None] = (ONCE, None)  # generation and rows of the last step's inputs
        self._plan: SchedulerOutput | None = None  # the step's, if it saves states

    def begin(self, plan: SchedulerOutput) -> None:
        """Copy the states that the plan copies, one after the other, and note those that its step saves."""
        self._plan = plan if plan.saved_rows.size else None
        for source, target in zip(plan.copied_states.tolist(), plan.copied_states_to.tolist(), strict=True):
            self._state(target)[:] = self._state(source)

    def _state(self, number: int) -> Tensor:
        """Return a view of the state with this number in plans."""
        if self._swapped is not None and number >= len(self.places):
            return self._swapped[number - len(self.places)]
        return self.states[self.places[number]]

    def of_step(self, inputs: StepInputs) -> StateRows:
        """Return where the states of a step's requests are stored, and where those before drafts go."""
        generation, rows = self._last
        if rows is None or generation == ONCE or generation != inputs.generation or self._plan is not None:
            firsts = np.concatenate((np.zeros(1, np.int64), np.cumsum(inputs.num_tokens, dtype=np.int64)))
            saves = None
            if (in_plan := inputs.sample_rows) is not None and (offsets := inputs.sample_offsets) is not None:
                saves = self.before_drafts(inputs.rows, in_plan, offsets, inputs.logits_rows, len(inputs.token_ids))
            rows = StateRows(self.states, self.places[inputs.rows], firsts, self.with_planned(saves, firsts))
            self._last = inputs.generation if self._plan is None else ONCE, rows
        return rows

    def with_planned(self, saves: Ints | None, firsts: Ints) -> Ints | None:
        """Return `saves` [T] with the states that the step's plan keeps; None: there are none.

        firsts [R + 1]: index of each request's first token, then T.
        """
        if (plan := self._plan) is None:
            return saves
        if saves is None:
            saves = np.full(int(firsts[-1]), -1)
        saves[firsts[plan.saved_rows] + plan.saved_after - 1] = self.places[plan.saved_slots]
        return saves

    def before_drafts(self, rows: Ints, in_plan: Ints, offsets: Ints, logits_tokens: AnyInts, num_tokens: int) -> Ints:
        """Return where a step with drafts stores the state after each token [T]; -1: only a row's last state is kept.

        rows [R]: the plan's. in_plan, offsets, logits_tokens [S]: see StepInputs. num_tokens: T.
        """
        drafted = np.flatnonzero(offsets[1:])  # samples followed by a draft of the same row
        assert len(drafted) <= len(self._spare), f"{len(drafted)} drafts, but slots for {len(self._spare)} states"
        saved, saves = np.full(len(offsets), -1), np.full(num_tokens, -1)
        saved[drafted], self._spare = self._spare[: len(drafted)], self._spare[len(drafted) :]
        saves[logits_tokens] = saved
        begins = np.flatnonzero(offsets == 0)
        self.drafted = DraftStates(rows[in_plan[begins]], in_plan[begins], begins, saved)
        return saves

    def trial_saves(self, num_tokens: int) -> Ints | None:
        """Return where a step of one row whose tokens are drafts stores states, as far as there are spare slots.

        None: nowhere. What it stores is never read.
        """
        if (count := min(num_tokens - 1, len(self._spare))) < 1:
            return None
        saves = np.full(num_tokens, -1)
        saves[:count] = self._spare[:count]
        return saves

    def accept(self, drafted: DraftStates, counts: AnyInts, live: Bools | None = None) -> None:
        """Give each row the state after its last accepted draft, and free the slots of the others.

        counts [R]: number of tokens that each row of the step yields. live [R]: rows that still belong to the same
        requests; None = all.
        """
        spare = drafted.saved[drafted.saved >= 0]
        last = drafted.saved[drafted.begins + np.maximum(counts[drafted.in_plan] - 1, 0)]
        takes = last >= 0 if live is None else (last >= 0) & live[drafted.in_plan]
        rows, last = drafted.rows[takes], last[takes]
        spare[np.isin(spare, last)] = self.places[rows]
        self._spare = np.concatenate((self._spare, spare))
        self.places[rows] = last
