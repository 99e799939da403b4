"""EditGroup: the interface of a sampling option that changes logits, for the rows that use it."""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import torch

from core.execution.plan import NewRow
from core.execution.runner_table import RunnerTable
from ipc.arrays import Bools, Ints, Positions, Rows, TokenIds

_NOT_SAMPLED = -1


class Edit(Protocol):
    """The change that one option makes to the logits of one batch."""

    def apply(self, logits: torch.Tensor) -> None:
        """Change logits [S, V] float32 in place. An edit reads and writes the logits of its own entries only, so the
        other rows keep their bits."""
        ...


class SampledRows:
    """The rows that are about to get a token.

    place [rows of the table]: a row's index in the batch, negative for rows outside it; is_sampled [rows of the
    table]; num_output_tokens [rows of the table]: valid for the sampled rows.
    """

    def __init__(self, rows: Rows, positions: Positions, table: RunnerTable, num_rows: int) -> None:
        """rows [S]: the batch; positions [S]: index of the token to draw in its row's output; num_rows: of the
        table."""
        self.table = table
        self.place = np.full(num_rows, _NOT_SAMPLED)
        self.place[rows] = np.arange(len(rows))
        self.num_output_tokens = np.zeros(num_rows, np.int64)
        self.num_output_tokens[rows] = positions
        self.is_sampled: Bools = self.place != _NOT_SAMPLED


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

    def append(self, rows: Rows, token_ids: TokenIds) -> None:  # noqa: B027 (most options do not look at tokens)
        """Take note of one sampled token for each of these rows [n], some of which may not use the option."""

    @abstractmethod
    def edit(self, sampled: SampledRows) -> Edit | None:
        """Return the change to the logits of the sampled rows; None where no row of the batch is concerned."""


class Forbidden(NamedTuple):
    """An edit that sets logits to -inf. Token ids outside the vocabulary are ignored."""

    row: Ints  # [n] index in the batch
    token: Ints  # [n]

    def apply(self, logits: torch.Tensor) -> None:
        known = self.token < logits.shape[1]
        logits[torch.from_numpy(self.row[known]), torch.from_numpy(self.token[known])] = -torch.inf
