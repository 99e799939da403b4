"""FeatureRows: the features of the batch's rows, and what stands for the tokens of each step that have ids below 0."""

from typing import NamedTuple

import numpy as np

from core.features.store import Features
from core.runner.step_inputs import StepInputs
from ipc.tables.arrays import Floats, Ints
from ipc.wire.feature_messages import FeatureUse


class StepFeatures(NamedTuple):
    """What the tokens of a step stand for."""

    token_ids: Ints  # [T]
    rows: Floats  # [F, width] float32
    wholes: Ints | None  # [n, 2] see Model.attention_metadata()


class FeatureRows:
    """The features of rows that have any. features: None = no request has one."""

    def __init__(self, features: Features | None) -> None:
        self._features = features
        self.of_row: dict[int, list[FeatureUse]] = {}  # of rows that have any; empty in most steps, which costs nothing

    def add(self, row: int, uses: list[FeatureUse]) -> None:
        """Take in a row that begins."""
        assert self._features is not None, f"row {row} has features, and this executor runs none"
        self.of_row[row] = uses

    def remove(self, row: int) -> None:
        """Forget a row that has left, if it has any."""
        self.of_row.pop(row, None)

    def of_step(self, inputs: StepInputs) -> StepFeatures | None:
        """Return the step's token ids and the rows that some of them stand for; None where no token is of a feature.

        token_ids: as in the inputs; those below 0 are -1 - row of `rows`.
        """
        ids = inputs.token_ids
        if int(ids.min()) >= 0:
            return None
        assert self._features is not None, "tokens have ids below 0, and this executor runs no features"
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
                        assert stop == use.position + use.num_rows, f"a step ends in a whole feature of row {row}"
                        wholes.append((end - count + begin - first, stop - begin))
        given = np.concatenate(parts)
        places = np.flatnonzero(ids < 0)
        assert len(places) == len(given), f"{len(places)} tokens have ids below 0, and their features {len(given)} rows"
        ids = ids.copy()
        ids[places] = -1 - np.arange(len(given))
        return StepFeatures(ids, given, np.array(wholes, np.int64) if wholes else None)
