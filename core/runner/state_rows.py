"""RowStates: the recurrent states of the batch's rows and those that are kept, and where those of a step are.

A row's state is in the row's place, so it needs no allocation. It is a function of the tokens that the row has
computed: the kernels begin with zeros at position 0. A request that begins at a later one has a kept state copied.
"""

import numpy as np

from core.execution.plan import SchedulerOutput
from core.models.step import ONCE
from core.runner.step_inputs import StepInputs
from ipc.arrays import Floats
from kernels.recurrence import StateRows


class RowStates:
    """The states of all rows, and slots for others. states [rows and slots, numbers] float32."""

    def __init__(self, states: Floats) -> None:
        self._states = states
        self._last: tuple[int, StateRows | None] = (ONCE, None)  # generation of the last step's inputs, and its rows

    def copy(self, plan: SchedulerOutput) -> None:
        """Copy the plan's states, one after the other."""
        for source, target in zip(plan.copied_states.tolist(), plan.copied_states_to.tolist(), strict=True):
            self._states[target] = self._states[source]

    def of_step(self, inputs: StepInputs) -> StateRows:
        """Return where the states of a step's requests are."""
        generation, rows = self._last
        if rows is None or generation == ONCE or generation != inputs.generation:
            firsts = np.concatenate((np.zeros(1, np.int64), np.cumsum(inputs.num_tokens, dtype=np.int64)))
            rows = StateRows(self._states, np.ascontiguousarray(inputs.rows, np.int64), firsts)
            self._last = inputs.generation, rows
        return rows
