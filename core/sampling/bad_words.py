"""BadWords: the option bad_words, sequences of tokens that a row must not produce.

The last token of a word is forbidden while the word's other tokens are the end of the row's output.
"""

import numpy as np

from core.execution.plan import NewRow
from core.sampling.edit_group import EditGroup, Forbidden, SampledRows
from core.sampling.row_group import RowGroup


class BadWords(EditGroup):
    """One entry for each token of each word.

    token; back: how many tokens before the end of its word it stands (0 = the last); word: number of the word.
    """

    options = ("bad_words_token_ids",)

    def __init__(self) -> None:
        self._parts = RowGroup(token=np.int64, back=np.int64, word=np.int64)
        self._num_words = 0  # ever added: tells neighbouring words apart

    def add(self, new: NewRow) -> bool:
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
        self._parts.remove(row)

    def edit(self, sampled: SampledRows) -> Forbidden | None:
        """Forbid the tokens that would complete a bad word now."""
        parts, table = self._parts, sampled.table
        active = sampled.is_sampled[parts["row"]]
        if not active.any():
            return None
        row, token, back, word = (parts[name][active] for name in ("row", "token", "back", "word"))
        is_last = back == 0
        is_there = back <= sampled.num_output_tokens[row]
        found = table.tokens.get(row, np.where(is_there, table.num_tokens[row] - back, 0))
        matches = is_last | (is_there & (found == token))
        starts = np.flatnonzero(np.diff(word, prepend=-1))
        complete = np.logical_and.reduceat(matches, starts)
        return Forbidden(sampled.place[row[is_last][complete]], token[is_last][complete])
