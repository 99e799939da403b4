"""Penalties: the options repetition_penalty, frequency_penalty and presence_penalty, and their window repeat_last_n.

A row looks at its whole text, whose counts are kept, or at a window of its last tokens, which are counted again for
each sample.
"""

from typing import NamedTuple

import numpy as np

from core.execution.plan import NewRow
from core.sampling.edit_group import EditGroup, Logits, SampledRows
from ipc.tables.arrays import AnyInts, Bools, Floats, Int32s, Ints, Rows, TokenIds

_NEUTRAL = (1.0, 0.0, 0.0)


class Penalties(EditGroup):
    """The three penalties of each row of the table, and token counts of the rows that look at their whole text."""

    options = ("repetition_penalty", "frequency_penalty", "presence_penalty")

    def __init__(self, num_rows: int) -> None:
        self._repetition = np.ones(num_rows, np.float32)
        self._frequency = np.zeros(num_rows, np.float32)
        self._presence = np.zeros(num_rows, np.float32)
        self._is_penalized = np.zeros(num_rows, np.bool_)  # by the whole text
        self._windows = np.zeros(num_rows, np.int64)  # tokens; 0 = no window
        self._num_windows = 0  # rows with one
        self._counts = TokenCounts()

    def add(self, new: NewRow) -> bool:
        """Add the row if its parameters use the option; return whether they do."""
        row, params = new.row, new.params
        penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        if penalties == _NEUTRAL or params.repeat_last_n == 0:
            return False
        self._repetition[row], self._frequency[row], self._presence[row] = penalties
        if params.repeat_last_n > 0:
            self._windows[row] = params.repeat_last_n
            self._num_windows += 1
            return True
        self._is_penalized[row] = True
        # the other penalties count only output
        repeated = new.num_prompt_tokens if params.repetition_penalty != 1 else 0
        prompt = new.token_ids[:repeated]
        self._counts.add(row, prompt[prompt >= 0], new.token_ids[new.num_prompt_tokens :])
        return True

    def remove(self, row: int) -> None:
        """Remove the row's penalties and counts, if it has any."""
        if self._windows[row]:
            self._windows[row] = 0
            self._num_windows -= 1
        if self._is_penalized[row]:
            self._is_penalized[row] = False
            self._counts.remove(row)

    def append(self, rows: Rows, token_ids: TokenIds, *, is_distinct: bool = True) -> None:
        """Count a sampled token of each of these rows that has a penalty."""
        counted = self._is_penalized[rows]
        if counted.any():
            self._counts.append(rows[counted], token_ids[counted], is_distinct=is_distinct)

    def edit(self, sampled: SampledRows) -> "Penalized | None":
        """Return the edit that applies the penalties, or None if no sampled row has tokens that they look at."""
        samples, tokens, occurrences = self._counted(sampled)
        if self._num_windows:
            columns = zip((samples, tokens, occurrences), self._in_windows(sampled), strict=True)
            samples, tokens, occurrences = (np.concatenate(pair) for pair in columns)
        if not len(samples):
            return None
        rows = sampled.samples.rows[samples]
        return Penalized(
            row=samples,
            token=tokens,
            occurrences=occurrences,
            repetition=self._repetition[rows],
            frequency=self._frequency[rows],
            presence=self._presence[rows],
        )

    def _counted(self, sampled: SampledRows) -> tuple[Ints, Ints, Ints]:
        """Return (sample, token, occurrences in the output before the sample) for the rows with penalties."""
        index, table, counts = sampled.samples, sampled.table, self._counts
        entries, samples = index.spread(counts.rows)
        tokens, occurrences = counts.tokens[entries], counts.counts[entries]
        if index.offsets is None:
            return samples, tokens, occurrences
        drafted, places = index.drafts(self._is_penalized)
        owners = index.rows[drafted]
        own = drafted, table.tokens.get(owners, table.num_tokens[owners] + places)
        return add_drafts(samples, tokens, occurrences, own)

    def _in_windows(self, sampled: SampledRows) -> tuple[Ints, Ints, Ints]:
        """Return (sample, token, occurrences in the window before the sample) for the rows with a window."""
        index, table = sampled.samples, sampled.table
        samples = np.flatnonzero(self._windows[index.rows])
        rows = index.rows[samples]
        ends = table.num_tokens[rows] + (0 if index.offsets is None else index.offsets[samples])
        lengths = np.minimum(self._windows[rows], ends)
        firsts: Ints = ends - lengths.cumsum()  # of each window, less the entries before it
        tokens = table.tokens.get(rows.repeat(lengths), np.arange(int(lengths.sum())) + firsts.repeat(lengths))
        keys = _keys(samples.repeat(lengths), tokens)[tokens >= 0]  # below 0: a vector or an image in the prompt
        pairs, occurrences = np.unique(keys, return_counts=True)
        return pairs >> _ROW_SHIFT, pairs & ((1 << _ROW_SHIFT) - 1), occurrences


class Penalized(NamedTuple):
    """An edit by the number of occurrences of tokens, as columns [n].

    Each (row, token) pair occurs once, and every token id is in the vocabulary.
    """

    row: Ints  # index of the sample
    token: Ints
    occurrences: Ints  # in the output or in the window; 0 = only in the prompt
    repetition: Floats  # the row's penalty, repeated for each of its tokens
    frequency: Floats
    presence: Floats

    def apply(self, logits: Logits) -> None:
        """Apply the penalties to logits [S, V], in place.

        The repetition penalty divides positive logits and multiplies others (Keskar et al. 2019, arXiv 1909.05858).
        Frequency and presence penalties are subtracted, as in the OpenAI API.
        """
        values = logits[self.row, self.token]
        values = np.where(values > 0, values / self.repetition, values * self.repetition)
        values -= self.frequency * self.occurrences.astype(np.float32)
        values -= self.presence * (self.occurrences > 0)
        logits[self.row, self.token] = values

    def moves(self, largest: Int32s) -> Ints:
        """Return the samples that the edit changes."""
        return self.row

    def only(self, wanted: Bools) -> "Penalized":
        """Return the part for the wanted samples."""
        kept = wanted[self.row]
        return Penalized(
            self.row[kept],
            self.token[kept],
            self.occurrences[kept],
            self.repetition[kept],
            self.frequency[kept],
            self.presence[kept],
        )


# TokenCounts: the number of occurrences of each token in the output of each row with penalties.


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
