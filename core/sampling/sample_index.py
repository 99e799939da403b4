"""SampleIndex: which of a step's samples are of which row; it spreads the entries of index groups over them."""

import numpy as np

from ipc.arrays import Bools, Ints, Rows


class SampleIndex:
    """S samples of some rows of the table. A row has one, or several that stand together: one behind its known tokens,
    and one behind each of its drafts, tokens that stand behind them in the table and are not known to be right.

    rows [S] of the table; offsets [S]: drafts before each sample; no array where every row has one sample, at offset 0
    """

    def __init__(self, rows: Rows, num_rows: int, offsets: Ints | None = None) -> None:
        """num_rows: of the table."""
        self.rows, self.offsets = rows, offsets
        self._firsts = np.zeros(num_rows, np.int64)  # first sample of each row
        if offsets is None:
            self._is_sampled = np.zeros(num_rows, np.bool_)
            self._is_sampled[rows] = True
            self._firsts[rows] = np.arange(len(rows))
        else:
            begins = np.flatnonzero(np.diff(rows, prepend=-1))
            self._counts = np.zeros(num_rows, np.int64)  # samples of each row
            self._counts[rows[begins]] = np.diff(begins, append=len(rows))
            self._firsts[rows[begins]] = begins

    def spread(self, rows: Rows) -> tuple[Ints | Bools, Ints]:
        """Each entry of a group beside each sample of its row, entry after entry. rows [n]: of the entries. Returns
        (entries as indices, or as a mask where a row has one sample, samples)."""
        if self.offsets is None:
            is_sampled = self._is_sampled[rows]
            return is_sampled, self._firsts[rows[is_sampled]]
        counts = self._counts[rows]
        entries: Ints = np.arange(len(rows)).repeat(counts)
        before: Ints = counts.cumsum() - counts
        samples: Ints = np.arange(len(entries)) + (self._firsts[rows] - before).repeat(counts)
        return entries, samples

    def drafts(self, is_wanted: Bools) -> tuple[Ints, Ints]:
        """(samples, places): each sample of the rows in the mask is_wanted [num_rows], beside each draft before it; the
        first draft of a row has place 0."""
        assert self.offsets is not None, "there are no drafts"
        samples = np.flatnonzero(is_wanted[self.rows])
        offsets = self.offsets[samples]
        before: Ints = offsets.cumsum() - offsets
        return samples.repeat(offsets), np.arange(int(offsets.sum())) - before.repeat(offsets)
