"""AllowedTokens: the option allowed_token_ids, which forbids every other token."""

from typing import NamedTuple

import numpy as np

from core.execution.plan import NewRow
from core.sampling.edit_group import EditGroup, Logits, SampledRows
from core.sampling.row_group import RowGroup
from ipc.tables.arrays import Bools, Int32s, Ints


class AllowedTokens(EditGroup):
    """The rows with allowed_token_ids: one entry per allowed token of each row."""

    options = ("allowed_token_ids",)

    def __init__(self) -> None:
        self._allowed = RowGroup(token=np.int64)

    def add(self, new: NewRow) -> bool:
        """Add the row if its parameters use the option; return whether they do."""
        if not new.params.allowed_token_ids:
            return False
        self._allowed.add(new.row, token=new.params.allowed_token_ids)
        return True

    def remove(self, row: int) -> None:
        """Remove the row's entries, if it has any."""
        self._allowed.remove(row)

    def edit(self, sampled: SampledRows) -> "OnlyThese | None":
        """Return the edit that keeps only the allowed tokens, or None if no sampled row uses the option."""
        entries, samples = sampled.samples.spread(self._allowed["row"])
        return OnlyThese(samples, self._allowed["token"][entries]) if len(samples) else None


class OnlyThese(NamedTuple):
    """An edit that sets all logits of its rows to -inf, except those of the named tokens.

    Every token id is in the vocabulary.
    """

    row: Ints  # [n] index of the sample
    token: Ints  # [n]

    def apply(self, logits: Logits) -> None:
        """Set the logits [S, V] of all other tokens of these rows to -inf, in place."""
        kept = logits[self.row, self.token]
        logits[np.unique(self.row)] = -np.inf
        logits[self.row, self.token] = kept

    def moves(self, largest: Int32s) -> Ints:
        """Return the samples that the edit changes."""
        return self.row

    def only(self, wanted: Bools) -> "OnlyThese":
        """Return the part for the wanted samples."""
        kept = wanted[self.row]
        return OnlyThese(self.row[kept], self.token[kept])
