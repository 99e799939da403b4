"""DeviceFeatures: the features of a device's rows: what a step gets of them, and how far they move later positions."""

from typing import NamedTuple

import numpy as np
import torch

from core.execution.plan import SchedulerOutput
from core.models.step import GivenRows
from core.runner.device_tables import DeviceTables
from core.runner.feature_rows import FeatureRows, StepTokens
from ipc.tables.arrays import Ints
from kernels.triton.attention_work import TritonWork

#: Positions of a token of an image whose rows form a grid.
AXES = 3


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
        count, device, self.turns = len(tables.tokens), tables.device, turns
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

    def buffers(self) -> "FeatureBuffers | None":
        """Return what graphs of steps with prompts read of features; None: no image is encoded."""
        encoder = self._rows.encoder
        if encoder is None:
            return None
        return FeatureBuffers(self, self._tables.device, width=encoder.width, sees_later=encoder.sees_whole)


class FeatureBuffers:
    """What graphs of steps with prompts read of a step's features, for as many tokens as the largest graph has.

    A model that sees images has it in all of these graphs. Of a step without features it changes nothing: rows have no
    places, heads are rotated by turned() and tokens see up to themselves.
    """

    def __init__(self, features: DeviceFeatures, device: torch.device, *, width: int, sees_later: bool) -> None:
        """width: numbers of a feature's row. sees_later: whether tokens of an image see later ones."""
        self._features, self._device, self._width, self._sees_later = features, device, width, sees_later

    def allocate(self, num_tokens: int) -> None:
        """Make room for the tokens of the largest graph."""
        none = torch.full((num_tokens,), -1, dtype=torch.int32, device=self._device)
        self._places = none.long()
        self._rows = torch.zeros((num_tokens, self._width), device=self._device)
        self._turned = torch.zeros_like(none)[:, None].repeat(1, AXES) if self._features.turns else None
        self._lasts = none if self._sees_later else None

    def lasts(self, num_tokens: int) -> torch.Tensor | None:
        """Return TritonWork.lasts of a graph of so many tokens."""
        return None if self._lasts is None else self._lasts[:num_tokens]

    def of_graph(self, num_tokens: int) -> SentFeatures:
        """Return what a graph of so many tokens reads."""
        turned = None if self._turned is None else self._turned[:num_tokens]
        return SentFeatures(GivenRows(self._places[:num_tokens], self._rows[:num_tokens]), turned, None)

    def fill(self, work: TritonWork, sent: SentFeatures | None) -> None:
        """Write what a step has. sent: of its features; None: it has none."""
        count, given, turned = work.num_rows, *((None, None) if sent is None else sent[:2])
        self._places.fill_(-1)
        if given is not None:
            found, width = given.rows.shape
            self._places[:found], self._rows[:found, :width] = given
            self._rows[:found, width:] = 0
        if self._turned is not None:
            if turned is None:
                turned = self._features.turned(work.rows, work.positions)
            assert turned is not None, "heads of these models are turned by positions of their own"
            self._turned[:count] = turned if turned.ndim > 1 else turned[:, None]
        if self._lasts is not None:
            self._lasts[:count] = work.positions if work.lasts is None else work.lasts
