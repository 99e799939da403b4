"""FeatureRows: the features of the batch's rows, and what they make of a step's tokens.

They give the embeddings for tokens that have ids below 0, and the positions of tokens in and after images whose rows
form grids: a function of the prompt's text and the sizes of its images alone.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import numpy as np

from core.execution.plan import SchedulerOutput
from core.runner.step_inputs import StepInputs
from ipc.tables.arrays import AnyInts, Floats, Ints
from ipc.wire.feature_messages import FeatureUse


class EncoderShape(Protocol):
    """What a process knows of an encoder of images that may run in another one."""

    @property
    def width(self) -> int:
        """Return the numbers of a row of embeddings."""

    @property
    def num_rows(self) -> int:
        """Return the most rows of an image."""

    @property
    def sees_whole(self) -> bool:
        """Return whether tokens of an image see its later ones."""


class KeptFeatures(Protocol):
    """The embeddings of features, by digest: core.features.store.Features, or what a worker has received."""

    @property
    def encoder(self) -> EncoderShape | None:
        """Return what encodes images; None: nothing does."""

    def encode(self, digest: bytes) -> None:
        """Make the embeddings of an image."""

    def encode_part(self, digest: bytes, part: int) -> None:
        """Make the embeddings of a large image up to the end of this part, counted from 1."""

    def drop(self, digests: Iterable[bytes]) -> None:
        """Forget the embeddings of images, if they are there."""

    def find(self, digest: bytes) -> Floats:
        """Return the embeddings [rows, width] float32 of a feature that a live request uses."""


class StepTokens(NamedTuple):
    """The columns of a step that say where features are; StepInputs have them too."""

    rows: AnyInts  # [R]
    num_tokens: AnyInts  # [R]
    positions: Ints  # [T] packed row after row


class FoundRows(NamedTuple):
    """The embeddings that replace tokens of a step."""

    places: Ints  # [F] indices of these tokens, ascending
    rows: Floats  # [F, width] float32
    wholes: Ints | None  # [n, 2] see Model.attention_metadata()


class StepFeatures(NamedTuple):
    """The embeddings that replace tokens of a step, by token ids below 0."""

    token_ids: Ints  # [T]
    rows: Floats  # [F, width] float32
    wholes: Ints | None  # [n, 2] see Model.attention_metadata()


class FeatureRows:
    """The features of rows that have any. features: None = no request can have one."""

    def __init__(self, features: KeptFeatures | None) -> None:
        self._features = features
        # of rows that have any; empty in most steps, so they cost nothing
        self.of_row: dict[int, list[FeatureUse]] = {}
        self.grids: dict[int, list[FeatureUse]] = {}  # those of them whose rows form grids

    @property
    def encoder(self) -> EncoderShape | None:
        """Return what encodes images; None: no request has any."""
        return None if self._features is None else self._features.encoder

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

    def apply(self, plan: SchedulerOutput) -> None:
        """Handle the rows of a plan that leave and start, and the images whose embeddings it drops and makes."""
        for row in plan.removed_rows.tolist():
            self.remove(row)
        for row, uses in plan.features:
            self.add(row, uses)
        if plan.scheduled_encoder_inputs or plan.freed_encoder_inputs or plan.image_parts:
            self.encode(plan)

    def encode(self, plan: SchedulerOutput) -> None:
        """Drop and make the embeddings of images, as the plan says. The plan's rows have been added."""
        assert self._features is not None, "the plan encodes images, but this executor does not support features"
        self._features.drop(plan.freed_encoder_inputs)
        for row, places in plan.scheduled_encoder_inputs:
            for place in places:
                self._features.encode(self.of_row[row][place].digest)
        for digest, part in plan.image_parts:
            self._features.encode_part(digest, part)

    def of_step(self, inputs: StepInputs) -> StepFeatures | None:
        """Return the step's token ids and the embeddings for some of them, or None if no token belongs to a feature.

        token_ids: as in the inputs; an id below 0 is -1 - index into `rows`.
        """
        ids = inputs.token_ids
        if int(ids.min()) >= 0:
            return None
        found, places = self.found(inputs), np.flatnonzero(ids < 0)
        assert found is not None, "tokens have ids below 0, but their rows have no features"
        count = len(found.rows)
        assert len(places) == count, f"{len(places)} tokens have ids below 0, but {count} feature rows exist"
        ids = ids.copy()
        ids[places] = -1 - np.arange(count)
        return StepFeatures(ids, found.rows, found.wholes)

    def found(self, step: StepTokens | StepInputs) -> FoundRows | None:
        """Return the embeddings that replace tokens of the step, or None if no token belongs to a feature."""
        parts, places, wholes = list[Floats](), list[Ints](), list[tuple[int, int]]()
        for row, begins, first, count in _spans(step):
            for use in self.of_row.get(row, ()):
                begin, stop = max(use.position, first), min(use.position + use.num_rows, first + count)
                if begin >= stop:
                    continue
                assert self._features is not None, f"row {row} has features, but this executor does not support them"
                parts.append(self._features.find(use.digest)[begin - use.position : stop - use.position])
                places.append(np.arange(begins + begin - first, begins + stop - first))
                if use.is_whole:
                    assert stop == use.position + use.num_rows, f"a step ends inside a whole feature of row {row}"
                    wholes.append((begins + begin - first, stop - begin))
        if not parts:
            return None
        return FoundRows(np.concatenate(places), _stacked(parts), np.array(wholes, np.int64) if wholes else None)

    def positions_of(self, step: StepTokens | StepInputs) -> Ints | None:
        """Return the positions by which a step's tokens are rotated; None if no row has grids. See ModelInputs.

        A token of a grid has three: that of the grid's first token, plus its row or its column in the second and the
        third. Text goes on behind the largest of them.
        """
        positions = step.positions.copy()
        images, is_moved = list[tuple[int, Ints]](), False
        for row, begins, first, count in _spans(step):
            if (uses := self.grids.get(row)) is None:
                continue
            end, shift = begins + count, 0
            for use in uses:
                if use.position >= first + count:
                    break
                within = np.arange(max(use.position, first), min(use.position + use.num_rows, first + count))
                if len(within):
                    images.append((begins + int(within[0]) - first, _in_grid(use, within - use.position, shift)))
                positions[begins + max(0, use.position + use.num_rows - first) : end] += _moved(use)
                shift += _moved(use)
                is_moved = True
        if not images:
            return positions if is_moved else None
        of_axes = np.repeat(positions[:, None], 3, 1)
        for place, own in images:
            of_axes[place : place + len(own)] = own
        return of_axes

    def shift_of(self, row: int) -> int:
        """Return how far the grids of a row move the positions of what follows them all."""
        return sum(map(_moved, self.grids.get(row, ())))

    def is_behind_grids(self, step: StepTokens) -> bool:
        """Return whether each of the step's tokens follows all grids of its row."""
        ends = {row: uses[-1].position + uses[-1].num_rows for row, uses in self.grids.items()}
        return all(first >= ends.get(row, 0) for row, _, first, _ in _spans(step))


def _spans(step: StepTokens | StepInputs) -> Iterator[tuple[int, int, int, int]]:
    """Yield each row of a step with the index of its first token, that token's position, and its number of tokens."""
    ends = step.num_tokens.cumsum()
    for row, end, count in zip(step.rows.tolist(), ends.tolist(), step.num_tokens.tolist(), strict=True):
        yield row, end - count, int(step.positions[end - count]), count


def _moved(use: FeatureUse) -> int:
    """Return how far a grid moves the positions of what follows it."""
    return max(use.num_columns, use.num_rows // use.num_columns) - use.num_rows


def _in_grid(use: FeatureUse, within: Ints, shift: int) -> Ints:
    """Return the three positions [n, 3] of these rows of a grid. shift: how far grids before it have moved it."""
    places = np.stack((np.zeros_like(within), within // use.num_columns, within % use.num_columns), 1)
    own: Ints = places + (use.position + shift)
    return own


def _stacked(parts: list[Floats]) -> Floats:
    """Return all rows. Some may be shorter: embeddings that a client gives add nothing after the first layers."""
    width = max(part.shape[1] for part in parts)
    return np.concatenate([np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in parts])
