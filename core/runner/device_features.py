"""DeviceFeatures: the features of a device's rows: what a step gets of them, and how far they move later positions."""

from typing import NamedTuple

import numpy as np
import torch

from core.execution.plan import SchedulerOutput
from core.models.step import GivenRows
from core.runner.device_tables import DeviceTables
from core.runner.feature_rows import FeatureRows, StepTokens
from ipc.tables.arrays import Ints


class SentFeatures(NamedTuple):
    """What features make of a step's tokens."""

    given: GivenRows | None
    #: Positions by which heads are rotated, int32 [T] or [T, 3]; None: those of DeviceFeatures.turned().
    turned: torch.Tensor | None
    wholes: Ints | None  # [n, 2] see Model.attention_metadata(); in host memory


class DeviceFeatures:
    """The features of a device runner's rows.

    An image whose rows form a grid moves the positions of what follows it. How far is known on the device for each row,
    so that a step of what follows needs nothing of the host, and may be a graph.
    """

    def __init__(self, rows: FeatureRows, tables: DeviceTables, *, turns: bool) -> None:
        """turns: whether tokens of images have three positions (config.rope_axes)."""
        self._rows, self._tables = rows, tables
        count, device = len(tables.tokens), tables.device
        self._shifts = torch.zeros(count, dtype=torch.int32, device=device) if turns else None

    def begin(self, plan: SchedulerOutput) -> None:
        """Note how far the grids of rows that start move what follows them. The rows have been added."""
        if self._shifts is None or not (starts := [new.row for new in plan.starts]):
            return
        moved = np.array([self._rows.shift_of(row) for row in starts], np.int32)
        self._shifts[self._tables.send(np.array(starts))] = self._tables.send(moved)

    def of_step(self, step: StepTokens) -> SentFeatures | None:
        """Return what features make of the step's tokens; None: nothing but what turned() returns."""
        rows = self._rows
        if not rows.of_row:
            return None
        found, turned = rows.found(step), None
        if self._shifts is not None and not rows.is_behind_grids(step):
            positions = rows.positions_of(step)
            turned = self._send(step.positions if positions is None else positions)
        if found is None:
            return None if turned is None else SentFeatures(None, turned, None)
        given = GivenRows(self._tables.send(found.places), self._tables.send(found.rows))
        return SentFeatures(given, turned, found.wholes)

    def _send(self, positions: Ints) -> torch.Tensor:
        return self._tables.send(positions.astype(np.int32))

    def turned(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """Return the positions that rotate heads of tokens behind all grids of their rows; None: the same ones.

        rows, positions [T] int32, -1 = padding.
        """
        if self._shifts is None:
            return None
        return positions + self._shifts[rows.clamp_min(0).long()]
