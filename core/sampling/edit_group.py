"""EditGroup: the interface of a sampling option that changes logits, for the rows that use it."""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np

from core.execution.plan import NewRow
from core.execution.runner_table import RunnerTable
from core.sampling.sample_index import SampleIndex
from ipc.tables.arrays import Bools, Floats, Int32s, Ints, Positions, Rows, TokenIds

#: Rows, or pairs of a row and a token, by their indices.
Index: TypeAlias = Ints | tuple[Ints, Ints]


class Logits(Protocol):
    """Logits [S, V] float32 that edits read and write: an array, or an adapter for logits on a device."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (number of samples, number of tokens)."""

    def __getitem__(self, index: Index) -> Floats:
        """Return a copy of some logits."""

    def __setitem__(self, index: Index, values: Floats | float) -> None:
        """Set some logits."""


class Edit(Protocol):
    """The change that one option makes to the logits of one batch."""

    @property
    def row(self) -> Ints:
        """Return the index of the sample of each entry. Samples without an entry are not changed."""

    def apply(self, logits: Logits) -> None:
        """Change logits [S, V] in place.

        An edit only reads and writes the logits of its own entries, so the other rows keep their bits.
        """
        ...

    def moves(self, largest: Int32s) -> Ints:
        """Return the samples whose largest logit may change with this edit.

        largest [S]: the index of each sample's largest logit before it; below 0: unknown, and any answer will do.
        """
        ...

    def only(self, wanted: Bools) -> "Edit":
        """Return the part of the edit for the wanted [S] samples."""
        ...


class SampledRows(NamedTuple):
    """The samples of a step, one per token to be drawn."""

    samples: SampleIndex
    positions: Positions  # [S] index of each sample in its row's output
    table: RunnerTable  # has the row's drafts after its tokens
    is_settled: Bools | None = None  # [S] samples whose tokens are known, because take() has accepted them


class EditGroup(ABC):
    """The rows that use one option. add() and remove() run once per request, append() and edit() once per step."""

    #: The fields of SamplingParams that enable the option. add() is not called for a row whose fields all have their
    #: defaults.
    options: ClassVar[tuple[str, ...]]
    #: Whether edit() can handle a sample after drafts when the row's earlier samples are not requested.
    looks_ahead: ClassVar[bool] = True
    #: Whether the option has take(). Such an option only forbids tokens.
    asks_first: ClassVar[bool] = False
    #: Whether edits apply top_k, top_p and min_p, so that drawing these samples does not. If so, it has filtered().
    applies_filters: ClassVar[bool] = False

    @abstractmethod
    def add(self, new: NewRow) -> bool:
        """Add the row if its parameters use the option; return whether they do."""

    @abstractmethod
    def remove(self, row: int) -> None:
        """Remove the row. A row that was not added is ignored."""

    def append(  # noqa: B027 (most options do not look at tokens)
        self, rows: Rows, token_ids: TokenIds, *, is_distinct: bool = True
    ) -> None:
        """Count a sampled token [n] of each of these rows [n]. Some of them may not use the option.

        is_distinct: each row occurs once. Otherwise a row's tokens are adjacent, in order.
        """

    def take(self, rows: list[int], tokens: list[int]) -> tuple[list[int], list[int]]:
        """Give each of these distinct rows [n] its token [n] if the option allows it; below 0: no token.

        Return (refused, closed): the indices of the rows that do not get theirs. Refused rows may try other tokens;
        closed rows need an edit. A row without the option may have any token. The others get their tokens: no edit() of
        these samples is requested, and append() of the tokens follows.
        """
        raise NotImplementedError(f"{type(self).__name__} has no take()")

    def filtered(self, rows: Rows, positions: Positions) -> Ints:
        """Return the samples [n] to which edit() applies the filters. rows, positions [S]: see SampledRows."""
        raise NotImplementedError(f"{type(self).__name__} does not apply filters")

    def failure(self, row: int) -> str | None:
        """Return why this option can leave the row no token; None for most options, and for rows that do not use it."""
        return None

    @abstractmethod
    def edit(self, sampled: SampledRows) -> Edit | None:
        """Return the edit of the sampled rows' logits, or None if no row of the batch uses the option."""


class Forbidden(NamedTuple):
    """An edit that sets logits to -inf. Token ids outside the vocabulary are ignored."""

    row: Ints  # [n] index of the sample
    token: Ints  # [n]

    def apply(self, logits: Logits) -> None:
        """Set the logits of these tokens to -inf, in place."""
        known = self.token < logits.shape[1]
        logits[self.row[known], self.token[known]] = -np.inf

    def moves(self, largest: Int32s) -> Ints:
        """Return the samples whose largest logit is forbidden."""
        moved: Ints = self.row[largest[self.row] == self.token]
        return moved

    def only(self, wanted: Bools) -> "Forbidden":
        """Return the part for the wanted samples."""
        kept = wanted[self.row]
        return Forbidden(self.row[kept], self.token[kept])
