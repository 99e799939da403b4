"""PagedRows: growable int32 lists, one per row, in pages of one pool; read and appended as columns.

Token ids (scheduler, runner, client) and block tables (scheduler, runner) use these. A dense rectangle of 4,096 rows x
128k tokens would take gigabytes; a list per row would cost Python per token.
"""

from collections.abc import Sequence

import numpy as np

from ipc.tables.arrays import AnyInts, Int32s, Ints, Positions, Rows


class PagedRows:
    """Rows of int32 values. The owner keeps each row's length; this class keeps the position of each value.

    `extend` and `clear` touch one row (an event); `append`, `ensure`, `set` and `get` take columns of rows.
    """

    def __init__(self, num_rows: int, page_size: int) -> None:
        assert page_size.bit_count() == 1, f"page_size {page_size} is not a power of two"
        self.page_size = page_size
        self._shift = page_size.bit_length() - 1
        self._mask = page_size - 1
        self._flat = np.zeros(16 * page_size, np.int32)
        self._free = list(range(15 * page_size, -1, -page_size))  # first slots of pages
        self._index = np.zeros((num_rows, 4), np.int64)  # [row, page of row] -> the page's first slot
        self._num_pages = np.zeros(num_rows, np.int64)

    @property
    def num_rows(self) -> int:
        """Return the number of rows."""
        return len(self._num_pages)

    def grow_rows(self, num_rows: int) -> None:
        """Make room for rows below num_rows. Existing rows keep their values."""
        more = num_rows - self.num_rows
        if more > 0:
            self._index = np.concatenate([self._index, np.zeros((more, self._index.shape[1]), np.int64)])
            self._num_pages = np.concatenate([self._num_pages, np.zeros(more, np.int64)])

    def ensure(self, rows: Rows, lengths: Ints) -> None:
        """Make room so that `set` works at any position below lengths[i] of rows[i].

        Only rows that need several pages cost Python.
        """
        need = (lengths + self._mask) >> self._shift
        have = self._num_pages[rows]
        short = need > have
        if not np.count_nonzero(short):  # a tenth of what short.any() takes
            return
        rows, need, have = rows[short], need[short], have[short]
        if int((need - have).max()) > 1:
            for row, count in zip(rows.tolist(), need.tolist(), strict=True):
                self._add_pages(row, count)
            return
        self._make_room(int(need.max()), len(rows))
        self._index[rows, have] = self._free[: -len(rows) - 1 : -1]
        del self._free[-len(rows) :]
        self._num_pages[rows] = need

    def slots(self, rows: Rows, positions: Positions) -> Ints:
        """Return the slots of values, for take() and put(). They are valid until their rows are cleared.

        Slots of one page are consecutive.
        """
        slots: Ints = self._index[rows, positions >> self._shift] + (positions & self._mask)
        return slots

    def take(self, slots: Ints) -> Int32s:
        """Return the values at these slots."""
        return self._flat[slots]

    def put(self, slots: Ints, values: AnyInts) -> None:
        """Write values at these slots."""
        self._flat[slots] = values

    def append(self, rows: Rows, lengths: Ints, values: AnyInts) -> None:
        """Write values[i] after the lengths[i] values of rows[i], and make room for it."""
        offsets = lengths & self._mask
        if np.count_nonzero(offsets) < len(rows):  # some rows begin a page
            self.ensure(rows, lengths + 1)
        self._flat[self._index[rows, lengths >> self._shift] + offsets] = values

    def set(self, rows: Rows, positions: Positions, values: AnyInts) -> None:
        """Write values[i] to row rows[i] at positions[i]."""
        self._flat[self.slots(rows, positions)] = values

    def set_runs(self, rows: Rows, starts: Ints, counts: Ints, values: AnyInts) -> None:
        """counts[i] values of rows[i] at positions starts[i], starts[i] + 1, ...; values: row after row."""
        firsts: Ints = counts.cumsum() - counts
        positions: Ints = np.arange(len(values)) + (starts - firsts).repeat(counts)
        self.set(rows.repeat(counts), positions, values)

    def get(self, rows: Rows, positions: Positions) -> Int32s:
        """Return values: values[i] is that of row rows[i] at positions[i]."""
        return self._flat[self.slots(rows, positions)]

    def get_runs(self, rows: Rows, starts: Ints, length: int) -> Int32s:
        """Return runs of values [n, length], run i from position starts[i] of rows[i] on.

        A run lies in one page: length divides the page size and each start.
        """
        runs: Int32s = self._flat.reshape(-1, length).take(self.slots(rows, starts) // length, axis=0)
        return runs

    def extend(self, row: int, length: int, values: AnyInts) -> None:
        """Write values at positions length, length + 1, ... of one row."""
        end = length + len(values)
        self._add_pages(row, (end + self._mask) >> self._shift)
        positions = np.arange(length, end)
        self._flat[self._slots_of_row(row, positions)] = values

    def fill(self, rows: Rows, values: Sequence[AnyInts]) -> None:
        """Write values[i], not empty, at positions 0, 1, ... of rows[i], which are clear."""
        size, count = self.page_size, len(rows)
        self._make_room(1, count)
        numbers = self._free[: -count - 1 : -1]
        del self._free[-count:]
        self._index[rows, 0] = numbers
        self._num_pages[rows] = 1
        flat = self._flat  # read again after extend(), which may grow the pool
        for row, part, first in zip(rows.tolist(), values, numbers, strict=True):
            if len(part) <= size:
                flat[first : first + len(part)] = part
            else:
                self.extend(row, 0, part)
                flat = self._flat

    def read(self, row: int, start: int, stop: int) -> Int32s:
        """Return a copy of positions start..stop-1 of one row."""
        if stop <= self.page_size:  # a slice of one page: a third of the time
            first = int(self._index[row, 0])
            return self._flat[first + start : first + stop].copy()
        return self._flat[self._slots_of_row(row, np.arange(start, stop))]

    def clear_all(self, rows: Rows) -> None:
        """Free the pages of these rows."""
        counts = self._num_pages[rows]
        if np.count_nonzero(counts == 1) == len(rows):
            self._free += self._index[rows, 0].tolist()
        else:
            used = np.arange(self._index.shape[1]) < counts[:, None]
            self._free += self._index[rows][used].tolist()
        self._num_pages[rows] = 0

    def clear(self, row: int) -> None:
        """Free the row's pages."""
        count = int(self._num_pages[row])
        self._free.extend(self._index[row, :count].tolist()[::-1])
        self._num_pages[row] = 0

    def blank_rest(self, rows: Rows, lengths: Ints) -> None:
        """Set all values to 0 except the first lengths[i] of rows[i]: values of earlier rows are still there."""
        slots = [self._slots_of_row(*one) for one in zip(rows.tolist(), map(np.arange, lengths.tolist()), strict=True)]
        kept = np.concatenate([np.zeros(0, np.int64), *slots])
        values = self._flat[kept]
        self._flat[:] = 0
        self._flat[kept] = values

    def _slots_of_row(self, row: int, positions: Positions) -> Ints:
        slots: Ints = self._index[row][positions >> self._shift] + (positions & self._mask)
        return slots

    def _add_pages(self, row: int, count: int) -> None:
        have = int(self._num_pages[row])
        if count <= have:
            return
        self._make_room(count, count - have)
        if count == have + 1:
            self._index[row, have] = self._free.pop()
        else:
            self._index[row, have:count] = self._free[: have - count - 1 : -1]
            del self._free[have - count :]
        self._num_pages[row] = count

    def _make_room(self, num_pages: int, num_more: int) -> None:
        """Make room for rows with num_pages pages, and num_more free pages."""
        if num_pages > self._index.shape[1]:
            width = max(num_pages, 2 * self._index.shape[1])
            wider = np.zeros((self.num_rows, width), np.int64)
            wider[:, : self._index.shape[1]] = self._index
            self._index = wider
        while len(self._free) < num_more:
            self._grow_pool()

    def _grow_pool(self) -> None:
        size = len(self._flat)
        self._flat = np.concatenate([self._flat, np.zeros_like(self._flat)])
        self._free.extend(range(2 * size - self.page_size, size - 1, -self.page_size))
