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
    """Logits [S, V] float32 that edits read and write: an array, or an adapter for those on a device."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The numbers of samples and of tokens."""

    def __getitem__(self, index: Index) -> Floats:
        """Return a copy of some logits."""

    def __setitem__(self, index: Index, values: Floats | float) -> None:
        """Set some logits."""


class Edit(Protocol):
    """The change that one option makes to the logits of one batch."""

    @property
    def row(self) -> Ints:
        """The index of the sample of each entry; samples without an entry are not changed."""

    def apply(self, logits: Logits) -> None:
        """Change logits [S, V] in place.

        An edit reads and writes the logits of its own entries only, so the other rows keep their bits.
        """
        ...

    def moves(self, largest: Int32s) -> Ints:
        """Return the samples whose largest logit may be another one after this edit.

        largest [S]: the index of each sample's largest logit before it; below 0: not known, and any answer will do.
        """
        ...

    def only(self, wanted: Bools) -> "Edit":
        """Return the part of the edit that is of the wanted [S] samples."""
        ...


class SampledRows(NamedTuple):
    """The samples of a step, one for each token to be drawn."""

    samples: SampleIndex
    positions: Positions  # [S] index of each sample in its row's output
    table: RunnerTable  # has the row's drafts behind its tokens
    is_settled: Bools | None = None  # [S] the samples whose tokens are known: take() has let their rows have them


class EditGroup(ABC):
    """The rows that use one option. add() and remove() run once a request, append() and edit() once a step."""

    #: The fields of SamplingParams that enable the option. add() is not called for a row whose fields all have their
    #: defaults.
    options: ClassVar[tuple[str, ...]]
    #: Whether edit() takes a sample behind drafts of which the row's earlier samples are not asked for, too.
    looks_ahead: ClassVar[bool] = True
    #: Whether the option has take(). It only forbids tokens then.
    asks_first: ClassVar[bool] = False
    #: Whether edits apply top_k, top_p and min_p, so that the draw of these samples does not. It has filtered() then.
    applies_filters: ClassVar[bool] = False

    @abstractmethod
    def add(self, new: NewRow) -> bool:
        """Add the row if its parameters use the option; return whether they do."""

    @abstractmethod
    def remove(self, row: int) -> None:
        """Remove the row; a row that was not added is ignored."""

    def append(  # noqa: B027 (most options do not look at tokens)
        self, rows: Rows, token_ids: TokenIds, *, is_distinct: bool = True
    ) -> None:
        """Count a sampled token [n] of each of these rows [n], some of which may not use the option.

        is_distinct: each row occurs once. Otherwise a row's tokens are adjacent, in their order.
        """

    def take(self, rows: list[int], tokens: list[int]) -> tuple[list[int], list[int]]:
        """Let each of these distinct rows [n] have its token [n], where the option allows it; below 0: no token.

        Return (refused, closed): the indices of the rows that may not have theirs. Those that are refused may have
        other tokens; of those that are closed no token is to be asked for. A row without the option may have any. The
        others get their tokens: no edit() of these samples is asked for, and append() of the tokens follows.
        """
        raise NotImplementedError(f"{type(self).__name__} asks about no tokens")

    def filtered(self, rows: Rows, positions: Positions) -> Ints:
        """Return the samples [n] to which edit() applies the filters. rows, positions [S]: see SampledRows."""
        raise NotImplementedError(f"{type(self).__name__} applies no filters")

    def failure(self, row: int) -> str | None:
        """Return why this option can leave the row no token; None for most options, and where the row has it not."""
        return None

    @abstractmethod
    def edit(self, sampled: SampledRows) -> Edit | None:
        """Return the edit of the sampled rows' logits; None where no row of the batch uses the option."""


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
        """Return the part of the wanted samples."""
        kept = wanted[self.row]
        return Forbidden(self.row[kept], self.token[kept])
