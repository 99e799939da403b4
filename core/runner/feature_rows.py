"""FeatureRows: the features of the batch's rows, and what they make of a step's tokens.

They give the embeddings for tokens that have ids below 0, and the positions of tokens in and after images whose rows
form grids: a function of the prompt's text and the sizes of its images alone.
"""

from typing import NamedTuple

import numpy as np

from core.execution.plan import SchedulerOutput
from core.features.store import Features
from core.runner.step_inputs import StepInputs
from ipc.tables.arrays import Floats, Ints
from ipc.wire.feature_messages import FeatureUse


class StepFeatures(NamedTuple):
    """The embeddings that replace tokens of a step."""

    token_ids: Ints  # [T]
    rows: Floats  # [F, width] float32
    wholes: Ints | None  # [n, 2] see Model.attention_metadata()


class FeatureRows:
    """The features of rows that have any. features: None = no request can have one."""

    def __init__(self, features: Features | None) -> None:
        self._features = features
        # of rows that have any; empty in most steps, so they cost nothing
        self.of_row: dict[int, list[FeatureUse]] = {}
        self.grids: dict[int, list[FeatureUse]] = {}  # those of them whose rows form grids

    def add(self, row: int, uses: list[FeatureUse]) -> None:
        """Handle a row that starts."""
        assert self._features is not None, f"row {row} has features, but this executor does not support them"
        self.of_row[row] = uses
        if grids := [use for use in uses if use.num_columns]:
            self.grids[row] = grids

    def remove(self, row: int) -> None:
        """Handle a row that has left, if it has features."""
        self.of_row.pop(row, None)
        self.grids.pop(row, None)

    def encode(self, plan: SchedulerOutput) -> None:
        """Drop and make the embeddings of images, as the plan says. The plan's rows have been added."""
        assert self._features is not None, "the plan encodes images, but this executor does not support features"
        self._features.drop(plan.freed_encoder_inputs)
        for row, places in plan.scheduled_encoder_inputs:
            for place in places:
                self._features.encode(self.of_row[row][place].digest)

    def of_step(self, inputs: StepInputs) -> StepFeatures | None:
        """Return the step's token ids and the embeddings for some of them, or None if no token belongs to a feature.

        token_ids: as in the inputs; an id below 0 is -1 - index into `rows`.
        """
        ids = inputs.token_ids
        if int(ids.min()) >= 0:
            return None
        assert self._features is not None, "tokens have ids below 0, but this executor does not support features"
        ends = inputs.num_tokens.cumsum()
        parts, wholes = list[Floats](), list[tuple[int, int]]()
        for row, end, count in zip(inputs.rows.tolist(), ends.tolist(), inputs.num_tokens.tolist(), strict=True):
            if (uses := self.of_row.get(row)) is None:
                continue
            first = int(inputs.positions[end - count])
            for use in uses:
                begin, stop = max(use.position, first), min(use.position + use.num_rows, first + count)
                if begin < stop:
                    parts.append(self._features.find(use.digest)[begin - use.position : stop - use.position])
                    if use.is_whole:
                        assert stop == use.position + use.num_rows, f"a step ends inside a whole feature of row {row}"
                        wholes.append((end - count + begin - first, stop - begin))
        given = _stacked(parts)
        places = np.flatnonzero(ids < 0)
        assert len(places) == len(given), f"{len(places)} tokens have ids below 0, but {len(given)} feature rows exist"
        ids = ids.copy()
        ids[places] = -1 - np.arange(len(given))
        return StepFeatures(ids, given, np.array(wholes, np.int64) if wholes else None)

    def positions_of(self, inputs: StepInputs) -> Ints | None:
        """Return the positions by which a step's tokens are rotated; None if no row has grids. See ModelInputs.

        A token of a grid has three: that of the grid's first token, plus its row or its column in the second and the
        third. Text goes on behind the largest of them.
        """
        positions, ends = inputs.positions.copy(), inputs.num_tokens.cumsum()
        images, is_moved = list[tuple[int, Ints]](), False
        for row, end, count in zip(inputs.rows.tolist(), ends.tolist(), inputs.num_tokens.tolist(), strict=True):
            if (uses := self.grids.get(row)) is None:
                continue
            begin, first, shift = end - count, int(inputs.positions[end - count]), 0
            for use in uses:
                if use.position >= first + count:
                    break
                within = np.arange(max(use.position, first), min(use.position + use.num_rows, first + count))
                if len(within):
                    images.append((begin + int(within[0]) - first, _in_grid(use, within - use.position, shift)))
                moved = max(use.num_columns, use.num_rows // use.num_columns) - use.num_rows
                positions[begin + max(0, use.position + use.num_rows - first) : end] += moved
                shift += moved
                is_moved = True
        if not images:
            return positions if is_moved else None
        of_axes = np.repeat(positions[:, None], 3, 1)
        for place, own in images:
            of_axes[place : place + len(own)] = own
        return of_axes


def _in_grid(use: FeatureUse, within: Ints, shift: int) -> Ints:
    """Return the three positions [n, 3] of these rows of a grid. shift: how far grids before it have moved it."""
    places = np.stack((np.zeros_like(within), within // use.num_columns, within % use.num_columns), 1)
    own: Ints = places + (use.position + shift)
    return own


def _stacked(parts: list[Floats]) -> Floats:
    """Return all rows. Some may be shorter: embeddings that a client gives add nothing after the first layers."""
    width = max(part.shape[1] for part in parts)
    return np.concatenate([np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in parts])
