"""NumberIndex: the journal's row of each live request, by the request's number; looked up as a column."""

import numpy as np

from ipc.tables.arrays import AnyInts, Ints


class NumberIndex:
    """Rows by request numbers, which only grow. -1: not live."""

    def __init__(self) -> None:
        # [1 + i]: row of number _first_number + i. Both ends stay -1: clipped look-ups land on them.
        self._row_of = np.full(66, -1, np.int64)
        self._first_number = 0

    def row(self, number: int) -> int:
        """Return the row of a number."""
        slot = number - self._first_number + 1
        return int(self._row_of[slot]) if 0 < slot < len(self._row_of) else -1

    def rows(self, numbers: AnyInts) -> Ints:
        """Return the rows [N] of these numbers, in a new array."""
        slots = numbers.astype(np.int64) - (self._first_number - 1)
        rows: Ints = self._row_of.take(slots, mode="clip")
        return rows

    def add(self, number: int, row: int) -> None:
        """Enter a number above all earlier ones."""
        slot = self._slot_for(number)
        assert self._row_of[slot] == -1, (number, int(self._row_of[slot]))
        self._row_of[slot] = row

    def remove(self, number: int) -> None:
        """Forget a live number."""
        self._row_of[number - self._first_number + 1] = -1

    def _slot_for(self, number: int) -> int:
        """Return the index of `number` in _row_of; drop leading removed numbers and enlarge the array if needed."""
        slot = number - self._first_number + 1
        assert slot > 0, (number, self._first_number)
        if slot < len(self._row_of) - 1:
            return slot
        live = np.flatnonzero(self._row_of >= 0)
        dropped = int(live[0]) - 1 if len(live) else slot - 1
        kept = self._row_of[1 + dropped : -1]
        slot -= dropped
        self._row_of = np.full(max(len(self._row_of), 2 * (slot + 1)), -1, np.int64)
        self._row_of[1 : 1 + len(kept)] = kept
        self._first_number += dropped
        return slot
