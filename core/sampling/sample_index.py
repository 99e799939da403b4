"""SampleIndex: the rows of a step's samples. It repeats the entries of a row for each of the row's samples."""

from functools import cached_property

import numpy as np

from ipc.tables.arrays import Bools, Ints, Rows


class SampleIndex:
    """S samples of some rows of the table.

    A row has one sample, or several adjacent ones: one after its known tokens and one after each of its drafts. Drafts
    are unverified tokens that the table has after the row's known tokens.

    rows [S]: rows of the table. offsets [S]: drafts before each sample; None if every row has one sample, at offset 0.
    """

    def __init__(self, rows: Rows, num_rows: int, offsets: Ints | None = None) -> None:
        """The index is built on first use. num_rows: rows of the table."""
        self.rows, self.offsets, self._num_rows = rows, offsets, num_rows

    @cached_property
    def _firsts(self) -> Ints:
        """Return the first sample of each row [num_rows]."""
        firsts = np.zeros(self._num_rows, np.int64)
        if self.offsets is None:
            firsts[self.rows] = np.arange(len(self.rows))
        else:
            firsts[self.rows[self._begins]] = self._begins
        return firsts

    @cached_property
    def _is_sampled(self) -> Bools:
        """Return whether each row [num_rows] has a sample."""
        is_sampled = np.zeros(self._num_rows, np.bool_)
        is_sampled[self.rows] = True
        return is_sampled

    @cached_property
    def _begins(self) -> Ints:
        """Return the samples that are the first of their rows."""
        return np.flatnonzero(np.diff(self.rows, prepend=-1))

    @cached_property
    def _counts(self) -> Ints:
        """Return the number of samples of each row [num_rows]."""
        counts = np.zeros(self._num_rows, np.int64)
        counts[self.rows[self._begins]] = np.diff(self._begins, append=len(self.rows))
        return counts

    def spread(self, rows: Rows) -> tuple[Ints | Bools, Ints]:
        """Return (entries, samples): each entry of a group paired with each sample of its row, entry after entry.

        rows [n]: the row of each entry. entries: indices; if every row has one sample, a mask [n] instead.
        """
        if self.offsets is None:
            is_sampled = self._is_sampled[rows]
            return is_sampled, self._firsts[rows[is_sampled]]
        counts = self._counts[rows]
        entries: Ints = np.arange(len(rows)).repeat(counts)
        before: Ints = counts.cumsum() - counts
        samples: Ints = np.arange(len(entries)) + (self._firsts[rows] - before).repeat(counts)
        return entries, samples

    def drafts(self, is_wanted: Bools) -> tuple[Ints, Ints]:
        """Return (samples, places): each wanted row's samples, each paired with every draft before it.

        is_wanted: mask [num_rows]. The first draft of a row has position 0.
        """
        assert self.offsets is not None, "there are no drafts"
        samples = np.flatnonzero(is_wanted[self.rows])
        offsets = self.offsets[samples]
        before: Ints = offsets.cumsum() - offsets
        return samples.repeat(offsets), np.arange(int(offsets.sum())) - before.repeat(offsets)
