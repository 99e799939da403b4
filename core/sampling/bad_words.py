"""BadWords: sequences of tokens that a row must not produce; the last token of one is forbidden when the others are
the end of the row's output."""

import numpy as np

from core.execution.runner_table import RunnerTable
from core.sampling.row_group import RowGroup
from core.sampling.sample_index import SampleIndex
from ipc.arrays import NO_INTS, Ints, Positions


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

    def forbidden(self, index: SampleIndex, positions: Positions, table: RunnerTable) -> tuple[Ints, Ints]:
        """(sample, token) pairs: tokens that would complete a bad word there.

        positions [S]: of each sample in its row's output. Drafts before a sample are read from the table.
        """
        entries, sample = index.spread(self._parts["row"])
        if not len(sample):
            return NO_INTS, NO_INTS
        is_several = index.offsets is not None
        if is_several:  # the parts of a word stand together for each sample
            order = np.lexsort((sample, self._parts["word"][entries]))
            entries, sample = entries[order], sample[order]
        row, token, back, word = (self._parts[name][entries] for name in ("row", "token", "back", "word"))
        is_last = back == 0
        is_there = back <= positions[sample]
        ends = table.num_prompt_tokens[row] + positions[sample]
        found = table.tokens.get(row, np.where(is_there, ends - back, 0))
        matches = is_last | (is_there & (found == token))
        begins = np.diff(word, prepend=-1)
        if is_several:
            begins |= np.diff(sample, prepend=-1)
        starts = np.flatnonzero(begins)
        complete = np.logical_and.reduceat(matches, starts)
        return sample[is_last][complete], token[is_last][complete]
