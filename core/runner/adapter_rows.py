"""AdapterRows: the adapters of the batch's rows, and of each step's tokens."""

from typing import Any

import numpy as np

from core.adapters.store import Adapters
from core.execution.plan import SchedulerOutput
from core.models.operations.token_adapters import TokenAdapters
from core.models.step import ONCE
from core.runner.step_inputs import StepInputs


class AdapterRows:
    """The packed adapters of rows that have one. adapters: None = no request has one."""

    def __init__(self, adapters: Adapters | None) -> None:
        self._adapters = adapters
        self._of_row: dict[int, Any] = {}
        self._generation = ONCE  # of the inputs that `_last` was made for
        self._last: TokenAdapters | None = None

    def __bool__(self) -> bool:
        """Return whether any row has an adapter."""
        return bool(self._of_row)

    def apply(self, plan: SchedulerOutput) -> None:
        """Take in the rows that left and those that begin."""
        if self._of_row:
            for row in plan.removed_rows.tolist():
                self._of_row.pop(row, None)
        for row, digest in plan.adapters:
            assert self._adapters is not None, f"row {row} has the adapter {digest}, and enable_lora is off"
            self._of_row[row] = self._adapters.find(digest)

    def of_step(self, inputs: StepInputs) -> TokenAdapters | None:
        """Return the adapters of a step's tokens; None where no token has one."""
        if inputs.generation != ONCE and inputs.generation == self._generation:
            return self._last
        places: dict[int, int] = {}  # by id() of the packed adapter
        packed: list[Any] = []
        of_row = np.full(len(inputs.rows), -1, np.int64)
        for index, row in enumerate(inputs.rows.tolist()):
            if (one := self._of_row.get(row)) is None:
                continue
            if id(one) not in places:
                places[id(one)] = len(packed)
                packed.append(one)
            of_row[index] = places[id(one)]
        self._generation = inputs.generation
        self._last = TokenAdapters(tuple(packed), of_row.repeat(inputs.num_tokens)) if packed else None
        return self._last
