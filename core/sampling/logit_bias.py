"""LogitBias: the option logit_bias, which adds a number to the logits of some tokens."""

from typing import NamedTuple

import numpy as np

from core.execution.plan import NewRow
from core.sampling.edit_group import EditGroup, Logits, SampledRows
from core.sampling.row_group import RowGroup
from ipc.tables.arrays import Bools, Floats, Int32s, Ints


class LogitBias(EditGroup):
    """The rows with a logit bias: one entry per biased token of each row."""

    options = ("logit_bias",)

    def __init__(self) -> None:
        self._bias = RowGroup(token=np.int64, bias=np.float32)

    def add(self, new: NewRow) -> bool:
        """Add the row if its parameters use the option; return whether they do."""
        bias = new.params.logit_bias
        if not bias:
            return False
        self._bias.add(new.row, token=list(bias), bias=list(bias.values()))
        return True

    def remove(self, row: int) -> None:
        """Remove the row's entries, if it has any."""
        self._bias.remove(row)

    def edit(self, sampled: SampledRows) -> "Biased | None":
        """Return the edit that adds the biases, or None if no sampled row uses the option."""
        entries, samples = sampled.samples.spread(self._bias["row"])
        if not len(samples):
            return None
        return Biased(samples, self._bias["token"][entries], self._bias["bias"][entries])


class Biased(NamedTuple):
    """An edit that adds to logits. Each (row, token) pair occurs once, and every token id is in the vocabulary."""

    row: Ints  # [n] index of the sample
    token: Ints  # [n]
    bias: Floats  # [n]

    def apply(self, logits: Logits) -> None:
        """Add the biases to logits [S, V], in place."""
        logits[self.row, self.token] += self.bias

    def moves(self, largest: Int32s) -> Ints:
        """Return the samples that the edit changes."""
        return self.row

    def only(self, wanted: Bools) -> "Biased":
        """Return the part for the wanted samples."""
        kept = wanted[self.row]
        return Biased(self.row[kept], self.token[kept], self.bias[kept])
