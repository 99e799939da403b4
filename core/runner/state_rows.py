"""RowStates: the recurrent states of the batch's rows and those that are kept, and where those of a step are.

A row's state is a function of the tokens that the row has computed. It needs no allocation: each row has a place, and
the kernels begin with zeros at position 0. A request that begins at a later one has a kept state copied.

A step with drafts also leaves the states before each draft, in spare places. Where a draft is wrong, the row goes on
with the state before it: the row and the spare change places, and nothing is copied or computed again.
"""

import numpy as np

from core.execution.plan import SchedulerOutput
from core.models.step import ONCE
from core.runner.step_inputs import StepInputs
from ipc.tables.arrays import NO_INTS, AnyInts, Floats, Ints
from kernels.recurrence import StateRows


class RowStates:
    """The states of all rows, and slots for others."""

    def __init__(self, states: Floats, num_spare: int = 0) -> None:
        """states [rows, slots and spare places, numbers] float32. num_spare: most drafts of a step."""
        self.states = states
        self.places: Ints = np.arange(len(states) - num_spare)  # of the states of rows and slots
        self._spare: Ints = np.arange(len(states) - num_spare, len(states))
        self._saved = NO_INTS  # [S] place of the state before the draft behind each sample of the step; -1: no draft
        self._last: tuple[int, StateRows | None] = (ONCE, None)  # generation of the last step's inputs, and its rows

    @property
    def takes_drafts(self) -> bool:
        """Whether steps may have drafts."""
        return len(self._spare) > 0

    def copy(self, plan: SchedulerOutput) -> None:
        """Copy the plan's states, one after the other."""
        for source, target in zip(plan.copied_states.tolist(), plan.copied_states_to.tolist(), strict=True):
            self.states[self.places[target]] = self.states[self.places[source]]

    def of_step(self, inputs: StepInputs) -> StateRows:
        """Return where the states of a step's requests are, and where those before drafts go."""
        generation, rows = self._last
        if rows is None or generation == ONCE or generation != inputs.generation:
            firsts = np.concatenate((np.zeros(1, np.int64), np.cumsum(inputs.num_tokens, dtype=np.int64)))
            saves = None if inputs.sample_offsets is None else self._save(inputs, inputs.sample_offsets)
            rows = StateRows(self.states, self.places[inputs.rows], firsts, saves)
            self._last = inputs.generation, rows
        return rows

    def _save(self, inputs: StepInputs, offsets: Ints) -> Ints:
        """Return the place [T] of the state behind each token; -1: of none but the row's last."""
        drafted = np.flatnonzero(offsets[1:])  # samples that a draft of the same row follows
        assert len(drafted) <= len(self._spare), f"{len(drafted)} drafts, and places for {len(self._spare)} states"
        self._saved, saves = np.full(len(offsets), -1), np.full(len(inputs.token_ids), -1)
        self._saved[drafted] = self._spare[: len(drafted)]
        saves[inputs.logits_rows] = self._saved
        return saves

    def accept(self, inputs: StepInputs, offsets: Ints, counts: AnyInts) -> None:
        """Give each row the state behind its last accepted draft.

        offsets [S]: of the inputs. counts [R]: tokens that each row of the step yields.
        """
        begins = np.flatnonzero(offsets == 0)
        in_plan = np.flatnonzero(inputs.samples)
        saved = self._saved[begins + np.maximum(counts[in_plan] - 1, 0)]
        rows, saved = inputs.rows[in_plan[saved >= 0]], saved[saved >= 0]
        self._spare[np.isin(self._spare, saved)] = self.places[rows]
        self.places[rows] = saved
