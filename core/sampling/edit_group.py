"""EditGroup: the interface of a sampling option that changes logits, for the rows that use it."""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple, Protocol

import torch

from core.execution.plan import NewRow
from core.execution.runner_table import RunnerTable
from core.sampling.sample_index import SampleIndex
from ipc.arrays import Ints, Positions, Rows, TokenIds


class Edit(Protocol):
    """The change that one option makes to the logits of one batch."""

    def apply(self, logits: torch.Tensor) -> None:
        """Change logits [S, V] float32 in place. An edit reads and writes the logits of its own entries only, so the
        other rows keep their bits."""
        ...


class SampledRows(NamedTuple):
    """The samples of a step: the rows that are about to get tokens."""

    samples: SampleIndex
    positions: Positions  # [S] of each sample in its row's output
    table: RunnerTable  # it has the drafts before a sample behind the row's tokens


class EditGroup(ABC):
    """The rows that use one option. add() and remove() are events; append() and edit() run once a step."""

    #: The fields of SamplingParams that switch the option on. A row whose fields all have their defaults is not given
    #: to add().
    options: ClassVar[tuple[str, ...]]

    @abstractmethod
    def add(self, new: NewRow) -> bool:
        """Take the row in if its parameters use the option; return whether they do."""

    @abstractmethod
    def remove(self, row: int) -> None:
        """Forget the row; a row that was not taken in is ignored."""

    def append(  # noqa: B027 (most options do not look at tokens)
        self, rows: Rows, token_ids: TokenIds, *, is_distinct: bool = True
    ) -> None:
        """Take note of a sampled token of each of these rows [n], some of which may not use the option. is_distinct:
        no row is there twice; else a row's tokens stand together, in their order."""

    @abstractmethod
    def edit(self, sampled: SampledRows) -> Edit | None:
        """Return the change to the logits of the sampled rows; None where no row of the batch is concerned."""


class Forbidden(NamedTuple):
    """An edit that sets logits to -inf. Token ids outside the vocabulary are ignored."""

    row: Ints  # [n] index of the sample
    token: Ints  # [n]

    def apply(self, logits: torch.Tensor) -> None:
        known = self.token < logits.shape[1]
        logits[torch.from_numpy(self.row[known]), torch.from_numpy(self.token[known])] = -torch.inf
