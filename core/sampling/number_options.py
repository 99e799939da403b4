"""NumberOptions: the base class of numeric options that change logits, with their columns."""

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from core.execution.plan import NewRow
from core.sampling.edit_group import Edit, EditGroup, SampledRows
from ipc.params.sampling_params import NUMBERS, SamplingParams
from ipc.tables.arrays import Ints, Positions, Rows

#: The dtype of a number's column, by the kind of the number.
_DTYPES: dict[type[int] | type[float], type[np.generic]] = {int: np.int64, float: np.float32}


class NumberOptions(EditGroup):
    """The rows with an option: a column [rows] per number, with the dtype of the number's declaration.

    A subclass names the numbers and implements edit_of(). A row uses the option if the first of `options` is above 0.
    """

    #: Numbers of SamplingParams that the option reads in addition to `options`, and that do not enable it.
    reads: ClassVar[tuple[str, ...]] = ()

    def __init__(self, num_rows: int) -> None:
        """Create empty columns for num_rows rows."""
        names = (*self.options, *self.reads)
        self.numbers = {name: np.zeros(num_rows, _DTYPES[NUMBERS[name].kind]) for name in names}
        self.seed = np.zeros(num_rows, np.uint64)
        self.choice = np.zeros(num_rows, np.int64)
        self._is_used = np.zeros(num_rows, np.bool_)

    def is_enabled(self, params: SamplingParams) -> bool:
        """Return whether these parameters use the option."""
        return bool(getattr(params, self.options[0]) > 0)

    @abstractmethod
    def edit_of(self, samples: Ints, rows: Rows, positions: Positions) -> Edit | None:
        """Return the edit for samples [n] of rows that use the option, or None if it changes none of them.

        rows [n]: of the columns. positions [n]: indices of the samples' tokens in their outputs.
        """

    def add(self, new: NewRow) -> bool:
        """Add the row if its parameters use the option; return whether they do."""
        row, params = new.row, new.params
        if not self.is_enabled(params):
            return False
        for name, column in self.numbers.items():
            column[row] = getattr(params, name)
        self.seed[row], self.choice[row] = new.seed, new.choice
        self._is_used[row] = True
        return True

    def remove(self, row: int) -> None:
        """Remove the row, if it has the option."""
        self._is_used[row] = False

    def edit(self, sampled: SampledRows) -> Edit | None:
        """Return the edit for the sampled rows with the option, or None if nothing changes."""
        rows = sampled.samples.rows
        samples = self.using(rows)
        return self.edit_of(samples, rows[samples], sampled.positions[samples]) if len(samples) else None

    def using(self, rows: Rows) -> Ints:
        """Return the indices of these rows that use the option."""
        return np.flatnonzero(self._is_used[rows])
