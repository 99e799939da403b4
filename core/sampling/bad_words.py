"""BadWords: the option bad_words: sequences of tokens that must not occur in a row's output.

The last token of a word is forbidden while the row's output ends with the word's other tokens.
"""

import numpy as np

from core.execution.plan import NewRow
from core.sampling.edit_group import EditGroup, Forbidden, SampledRows
from core.sampling.row_group import RowGroup


class BadWords(EditGroup):
    """The rows with bad words: one entry per token of each word.

    Columns: token; back: tokens between it and the end of its word (0 = the last token); word: number of the word.
    """

    options = ("bad_words_token_ids",)

    def __init__(self) -> None:
        self._parts = RowGroup(token=np.int64, back=np.int64, word=np.int64)
        self._num_words = 0  # number of words added so far; adjacent words get different numbers

    def add(self, new: NewRow) -> bool:
        """Add the row if its parameters use the option; return whether they do."""
        words = new.params.bad_words_token_ids
        if not words:
            return False
        lengths = np.array([len(word) for word in words])
        ends = np.repeat(np.cumsum(lengths), lengths)
        self._parts.add(
            new.row,
            token=[token for word in words for token in word],
            back=ends - 1 - np.arange(int(lengths.sum())),
            word=self._num_words + np.repeat(np.arange(len(words)), lengths),
        )
        self._num_words += len(words)
        return True

    def remove(self, row: int) -> None:
        """Remove the row's entries, if it has any."""
        self._parts.remove(row)

    def edit(self, sampled: SampledRows) -> Forbidden | None:
        """Return the edit that forbids tokens that would now complete a bad word."""
        entries, sample = sampled.samples.spread(self._parts["row"])
        if not len(sample):
            return None
        positions, table = sampled.positions, sampled.table
        is_several = sampled.samples.offsets is not None
        if is_several:  # the entries of a word must be adjacent for each sample
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
        return Forbidden(sample[is_last][complete], token[is_last][complete])
