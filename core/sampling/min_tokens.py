"""MinTokens: the option min_tokens, which forbids ending tokens until the output has min_tokens tokens."""

import numpy as np

from core.execution.plan import NewRow
from core.sampling.edit_group import EditGroup, Forbidden, SampledRows
from core.sampling.row_group import RowGroup


class MinTokens(EditGroup):
    """The rows with min_tokens: one entry per ending token of each row: stop tokens, and EOS unless ignore_eos."""

    options = ("min_tokens",)

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids
        self._ending = RowGroup(token=np.int64, below=np.int64)  # below: the row's min_tokens

    def add(self, new: NewRow) -> bool:
        """Add the row if its parameters use the option; return whether they do."""
        params = new.params
        if not params.min_tokens:
            return False
        ending = [*(params.stop_token_ids or ()), *(() if params.ignore_eos else self._eos_token_ids)]
        self._ending.add(new.row, token=ending, below=[params.min_tokens] * len(ending))
        return True

    def remove(self, row: int) -> None:
        """Remove the row's entries, if it has any."""
        self._ending.remove(row)

    def edit(self, sampled: SampledRows) -> Forbidden | None:
        """Return the edit that forbids ending tokens, or None if every sampled row has its min_tokens."""
        entries, samples = sampled.samples.spread(self._ending["row"])
        early = sampled.positions[samples] < self._ending["below"][entries]
        return Forbidden(samples[early], self._ending["token"][entries][early]) if early.any() else None
