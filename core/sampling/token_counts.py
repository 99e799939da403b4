"""TokenCounts: how often each token occurs in the output of each row with penalties, kept up as tokens come."""

import numpy as np

from ipc.arrays import AnyInts, Int32s, Ints, Rows, TokenIds

_ROW_SHIFT = 32


class TokenCounts:
    """n distinct (row, token) pairs, sorted. A token of the prompt that the output does not have counts 0.

    keys [n] int64: row << 32 | token; counts [n] int64: occurrences in the row's output
    """

    def __init__(self) -> None:
        self.keys = np.zeros(0, np.int64)
        self.counts = np.zeros(0, np.int64)

    @property
    def rows(self) -> Ints:
        return self.keys >> _ROW_SHIFT

    @property
    def tokens(self) -> Ints:
        return self.keys & ((1 << _ROW_SHIFT) - 1)

    def add(self, row: int, prompt: Int32s, output: Int32s) -> None:
        """A row with these tokens; prompt: those that are to be known with count 0."""
        tokens, counts = np.unique(output, return_counts=True)
        only_prompt = np.setdiff1d(prompt, tokens)
        self._insert(_keys(row, np.concatenate([only_prompt, tokens])), np.append(np.zeros_like(only_prompt), counts))

    def remove(self, row: int) -> None:
        first, last = np.searchsorted(self.keys, np.array([row, row + 1]) << _ROW_SHIFT).tolist()
        self.keys = np.delete(self.keys, slice(first, last))
        self.counts = np.delete(self.counts, slice(first, last))

    def append(self, rows: Rows, token_ids: TokenIds) -> None:
        """One more output token of each of these distinct rows."""
        keys = _keys(rows, token_ids)
        places = np.searchsorted(self.keys, keys)
        known = places < len(self.keys)
        known[known] = self.keys[places[known]] == keys[known]
        self.counts[places[known]] += 1
        if not known.all():
            self._insert(keys[~known], np.ones(np.count_nonzero(~known), np.int64))

    def _insert(self, keys: Ints, counts: AnyInts) -> None:
        merged = np.concatenate([self.keys, keys])
        order = np.argsort(merged, kind="stable")  # finds the long run that is sorted already
        self.keys, self.counts = merged[order], np.concatenate([self.counts, counts])[order]


def _keys(rows: Rows | int, token_ids: AnyInts) -> Ints:
    keys: Ints = (np.asarray(rows, np.int64) << _ROW_SHIFT) | token_ids
    return keys
