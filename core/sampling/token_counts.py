"""TokenCounts: the number of occurrences of each token in the output of each row with penalties."""

import numpy as np

from ipc.tables.arrays import AnyInts, Int32s, Ints, Rows, TokenIds

_ROW_SHIFT = 32


class TokenCounts:
    """n distinct (row, token) pairs, sorted, with their counts. A token that only the prompt has is counted 0 times.

    keys [n] int64: row << 32 | token. counts [n] int64: occurrences in the row's output.
    """

    def __init__(self) -> None:
        self.keys = np.zeros(0, np.int64)
        self.counts = np.zeros(0, np.int64)

    @property
    def rows(self) -> Ints:
        """Return the row of each pair [n]."""
        return self.keys >> _ROW_SHIFT

    @property
    def tokens(self) -> Ints:
        """Return the token of each pair [n]."""
        return self.keys & ((1 << _ROW_SHIFT) - 1)

    def add(self, row: int, prompt: Int32s, output: Int32s) -> None:
        """Add a row with these output tokens. prompt: tokens to add with count 0 if the output lacks them."""
        tokens, counts = np.unique(output, return_counts=True)
        only_prompt = np.setdiff1d(prompt, tokens)
        self._insert(_keys(row, np.concatenate([only_prompt, tokens])), np.append(np.zeros_like(only_prompt), counts))

    def remove(self, row: int) -> None:
        """Remove the row's pairs, if it has any."""
        first, last = np.searchsorted(self.keys, np.array([row, row + 1]) << _ROW_SHIFT).tolist()
        self.keys = np.delete(self.keys, slice(first, last))
        self.counts = np.delete(self.counts, slice(first, last))

    def append(self, rows: Rows, token_ids: TokenIds, *, is_distinct: bool = True) -> None:
        """Count one more output token of each of these rows [n]. is_distinct: each row occurs once."""
        keys, more = _keys(rows, token_ids), np.ones(len(rows), np.int64)
        if not is_distinct:
            keys, more = np.unique(keys, return_counts=True)
        places = np.searchsorted(self.keys, keys)
        known = places < len(self.keys)
        known[known] = self.keys[places[known]] == keys[known]
        self.counts[places[known]] += more[known]
        if not known.all():
            self._insert(keys[~known], more[~known])

    def _insert(self, keys: Ints, counts: AnyInts) -> None:
        merged = np.concatenate([self.keys, keys])
        order = np.argsort(merged, kind="stable")  # the stable sort benefits from the long run that is already sorted
        self.keys, self.counts = merged[order], np.concatenate([self.counts, counts])[order]


def add_drafts(samples: Ints, tokens: Ints, counts: Ints, drafts: tuple[Ints, Int32s]) -> tuple[Ints, Ints, Ints]:
    """Return (samples, tokens, counts) with each draft counted as one more occurrence.

    drafts: (samples, tokens). Each (sample, token) pair occurs once in the result.
    """
    keys = np.concatenate([_keys(samples, tokens), _keys(*drafts)])
    amounts = np.concatenate([counts, np.ones(len(drafts[0]), np.int64)])
    distinct, inverse = np.unique(keys, return_inverse=True)
    totals = np.zeros(len(distinct), np.int64)
    np.add.at(totals, inverse, amounts)
    return distinct >> _ROW_SHIFT, distinct & ((1 << _ROW_SHIFT) - 1), totals


def _keys(rows: Rows | int, token_ids: AnyInts) -> Ints:
    keys: Ints = (np.asarray(rows, np.int64) << _ROW_SHIFT) | token_ids
    return keys
