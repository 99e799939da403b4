"""WindowInputs: a model's inputs if layers with a window have their own blocks (core/models/layers/cache_pages.py)."""

import numpy as np

from core.execution.plan import SchedulerOutput
from core.runner.step_inputs import Decoding, InputMaker, StepInputs
from ipc.tables.arrays import NO_INTS, Int32s, Ints


class WindowInputs(InputMaker):
    """The maker of each step's inputs, with slots and block tables for these layers, too.

    They are advanced as the others are.
    """

    _window_slots: Ints = NO_INTS
    _window_tables: Int32s

    def _make(self, plan: SchedulerOutput) -> StepInputs:
        inputs = super()._make(plan)
        table, positions = self._table, inputs.positions
        owners = inputs.rows if len(positions) == len(inputs.rows) else inputs.rows.repeat(inputs.num_tokens)
        blocks = table.window_blocks.get(owners, positions >> self._shift)
        self._window_slots = self._slots(blocks, positions)
        self._window_tables = table.window_tables(inputs.rows, inputs.block_tables.shape[1])
        inputs = inputs._replace(window_slots=self._window_slots, window_tables=self._window_tables)
        if self._decoding is not None:
            self._decoding.inputs = inputs
        return inputs

    def _move_on(self, decoding: Decoding) -> bool:
        enters = not decoding.num_steps
        if not super()._move_on(decoding):
            return False
        np.add(self._window_slots, 1, out=self._window_slots)
        if enters:
            self._enter_windows(decoding)
        return True

    def _enter_windows(self, decoding: Decoding) -> None:
        """Write the blocks that some rows have entered into their tables."""
        entered = np.flatnonzero((decoding.positions & self._mask) == 0)
        rows, places = decoding.inputs.rows[entered], decoding.positions[entered] >> self._shift
        num_blocks = self._table.num_window_blocks[rows]
        assert not np.count_nonzero(places >= num_blocks), f"rows enter blocks {places} of {num_blocks}"
        blocks = self._table.window_blocks.get(rows, places)
        self._window_tables[entered, places] = blocks
        self._window_slots[entered] = blocks * np.int64(self._block_size)
