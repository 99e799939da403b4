"""BadWords: sequences of tokens that a row must not produce; the last token of one is forbidden when the others are
the end of the row's output."""

import numpy as np

from core.execution.runner_table import RunnerTable
from core.sampling.row_group import RowGroup
from ipc.arrays import Ints


class BadWords:
    """The index group of rows with bad words: one entry for each token of each word.

    token; back: how many tokens before the end of its word it stands (0 = the last); word: number of the word.
    """

    def __init__(self) -> None:
        self._parts = RowGroup(token=np.int64, back=np.int64, word=np.int64)
        self._num_words = 0  # ever added: tells neighbouring words apart

    def add(self, row: int, words: list[list[int]]) -> None:
        """words: token ids of each; none is empty."""
        if not words:
            return
        lengths = np.array([len(word) for word in words])
        ends = np.repeat(np.cumsum(lengths), lengths)
        self._parts.add(
            row,
            token=[token for word in words for token in word],
            back=ends - 1 - np.arange(int(lengths.sum())),
            word=self._num_words + np.repeat(np.arange(len(words)), lengths),
        )
        self._num_words += len(words)

    def remove(self, row: int) -> None:
        self._parts.remove(row)

    def forbidden(self, is_sampled: Ints, num_output_tokens: Ints, table: RunnerTable) -> tuple[Ints, Ints]:
        """(row, token) pairs: tokens that would complete a bad word now.

        is_sampled [rows] bool: the rows that are about to get a token; num_output_tokens [rows]: valid for those.
        """
        parts = self._parts
        active = is_sampled[parts["row"]]
        row, token, back, word = (parts[name][active] for name in ("row", "token", "back", "word"))
        if not len(row):
            return row, token
        is_last = back == 0
        is_there = back <= num_output_tokens[row]
        found = table.tokens.get(row, np.where(is_there, table.num_tokens[row] - back, 0))
        matches = is_last | (is_there & (found == token))
        starts = np.flatnonzero(np.diff(word, prepend=-1))
        complete = np.logical_and.reduceat(matches, starts)
        return row[is_last][complete], token[is_last][complete]
