"""Penalties: the options repetition_penalty, frequency_penalty and presence_penalty."""

from typing import NamedTuple

import numpy as np

from core.execution.plan import NewRow
from core.sampling.edit_group import EditGroup, Logits, SampledRows
from core.sampling.token_counts import TokenCounts, add_drafts
from ipc.tables.arrays import Bools, Floats, Int32s, Ints, Rows, TokenIds

_NEUTRAL = (1.0, 0.0, 0.0)


class Penalties(EditGroup):
    """The three penalties of each row of the table, and token counts of the rows that have a penalty."""

    options = ("repetition_penalty", "frequency_penalty", "presence_penalty")

    def __init__(self, num_rows: int) -> None:
        self._repetition = np.ones(num_rows, np.float32)
        self._frequency = np.zeros(num_rows, np.float32)
        self._presence = np.zeros(num_rows, np.float32)
        self._is_penalized = np.zeros(num_rows, np.bool_)
        self._counts = TokenCounts()

    def add(self, new: NewRow) -> bool:
        """Add the row if its parameters use the option; return whether they do."""
        row, params = new.row, new.params
        penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        if penalties == _NEUTRAL:
            return False
        self._is_penalized[row] = True
        self._repetition[row], self._frequency[row], self._presence[row] = penalties
        # the other penalties count only output
        repeated = new.num_prompt_tokens if params.repetition_penalty != 1 else 0
        prompt = new.token_ids[:repeated]
        self._counts.add(row, prompt[prompt >= 0], new.token_ids[new.num_prompt_tokens :])
        return True

    def remove(self, row: int) -> None:
        """Remove the row's penalties and counts, if it has any."""
        if self._is_penalized[row]:
            self._is_penalized[row] = False
            self._counts.remove(row)

    def append(self, rows: Rows, token_ids: TokenIds, *, is_distinct: bool = True) -> None:
        """Count a sampled token of each of these rows that has a penalty."""
        counted = self._is_penalized[rows]
        if counted.any():
            self._counts.append(rows[counted], token_ids[counted], is_distinct=is_distinct)

    def edit(self, sampled: SampledRows) -> "Penalized | None":
        """Return the edit that applies the penalties, or None if no sampled row has counted tokens."""
        samples, tokens, occurrences = self._counted(sampled)
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


class Penalized(NamedTuple):
    """An edit by the number of occurrences of tokens, as columns [n].

    Each (row, token) pair occurs once, and every token id is in the vocabulary.
    """

    row: Ints  # index of the sample
    token: Ints
    occurrences: Ints  # in the output; 0 = only in the prompt
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
