"""RowGroup: the rows that use an uncommon option, as columns of entries; rows without the option have no entry."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ipc.tables.arrays import Ints


class RowGroup:
    """Entries in one structured array: "row" and the named columns.

    A row's entries are adjacent, in the order in which they were added. add() and remove() run once per request; a step
    only reads the columns.
    """

    def __init__(self, **columns: type[np.generic]) -> None:
        """Create an empty group. columns: name and dtype of each column in addition to "row"."""
        self._entries = np.zeros(0, [("row", np.int64), *columns.items()])

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._entries[name]

    def add(self, row: int, **values: list[int] | list[float] | Ints) -> None:
        """Append the row's entries. values: each column's values, one per entry."""
        more = np.zeros(len(next(iter(values.values()))), self._entries.dtype)
        more["row"] = row
        for name, column in values.items():
            more[name] = column
        self._entries = np.concatenate([self._entries, more])

    def remove(self, row: int) -> None:
        """Remove the row's entries, if it has any."""
        if len(self._entries):
            self._entries = self._entries[self._entries["row"] != row]
