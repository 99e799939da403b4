"""Penalties: the options repetition_penalty, frequency_penalty and presence_penalty."""

from typing import NamedTuple

import numpy as np
import torch

from core.execution.plan import NewRow
from core.sampling.edit_group import EditGroup, SampledRows
from core.sampling.token_counts import TokenCounts
from ipc.arrays import Floats, Ints, Rows, TokenIds

_NEUTRAL = (1.0, 0.0, 0.0)


class Penalties(EditGroup):
    """Three penalties [rows of the table], and how often each token occurs in the rows that have any."""

    options = ("repetition_penalty", "frequency_penalty", "presence_penalty")

    def __init__(self, num_rows: int) -> None:
        self._repetition = np.ones(num_rows, np.float32)
        self._frequency = np.zeros(num_rows, np.float32)
        self._presence = np.zeros(num_rows, np.float32)
        self._is_penalized = np.zeros(num_rows, np.bool_)
        self._counts = TokenCounts()

    def add(self, new: NewRow) -> bool:
        row, params = new.row, new.params
        penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        if penalties == _NEUTRAL:
            return False
        self._is_penalized[row] = True
        self._repetition[row], self._frequency[row], self._presence[row] = penalties
        repeated = new.num_prompt_tokens if params.repetition_penalty != 1 else 0  # the others count outputs
        self._counts.add(row, new.token_ids[:repeated], new.token_ids[new.num_prompt_tokens :])
        return True

    def remove(self, row: int) -> None:
        if self._is_penalized[row]:
            self._is_penalized[row] = False
            self._counts.remove(row)

    def append(self, rows: Rows, token_ids: TokenIds) -> None:
        counted = self._is_penalized[rows]
        if counted.any():
            self._counts.append(rows[counted], token_ids[counted])

    def edit(self, sampled: SampledRows) -> "Penalized | None":
        rows = self._counts.rows
        chosen = sampled.is_sampled[rows]
        if not chosen.any():
            return None
        row = rows[chosen]
        return Penalized(
            row=sampled.place[row],
            token=self._counts.tokens[chosen],
            occurrences=self._counts.counts[chosen],
            repetition=self._repetition[row],
            frequency=self._frequency[row],
            presence=self._presence[row],
        )


class Penalized(NamedTuple):
    """An edit by how often tokens occur: columns [n]. No (row, token) is twice in it; every token id is in the
    vocabulary."""

    row: Ints  # index in the batch
    token: Ints
    occurrences: Ints  # in the output; 0 = in the prompt only
    repetition: Floats  # the row's penalty, beside each of its tokens
    frequency: Floats
    presence: Floats

    def apply(self, logits: torch.Tensor) -> None:
        """Repetition: positive logits are divided by it, others multiplied (Keskar et al. 2019, arXiv 1909.05858);
        frequency and presence as in the OpenAI API."""
        rows, tokens = torch.from_numpy(self.row), torch.from_numpy(self.token)
        values = logits[rows, tokens].cpu().numpy()
        values = np.where(values > 0, values / self.repetition, values * self.repetition)
        values -= self.frequency * self.occurrences.astype(np.float32)
        values -= self.presence * (self.occurrences > 0)
        logits[rows, tokens] = torch.from_numpy(values).to(logits.device)
