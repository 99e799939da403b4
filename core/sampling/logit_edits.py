"""LogitEdits: what the uncommon options change in a batch's logits before the temperature.

Each option is an index group: columns of (row, token) entries, of the rows that use it alone. An edit reads and writes
the logits of its own entries, so rows without options keep their bits and cost nothing.
"""

from typing import NamedTuple

import numpy as np
import torch

from ipc.arrays import NO_FLOATS, NO_INTS, Floats, Ints


class LogitEdits(NamedTuple):
    """Entries over the S rows of a batch; every token id is in the vocabulary but those of `forbidden`, of which
    others are ignored. No (row, token) is twice in bias or counted."""

    limited: Ints = NO_INTS  # [A] rows that may draw only what `allowed` names
    allowed_row: Ints = NO_INTS  # [n]
    allowed_token: Ints = NO_INTS
    forbidden_row: Ints = NO_INTS  # [F] bad words about to be complete, and what min_tokens forbids
    forbidden_token: Ints = NO_INTS
    bias_row: Ints = NO_INTS  # [B]
    bias_token: Ints = NO_INTS
    bias: Floats = NO_FLOATS
    counted_row: Ints = NO_INTS  # [C] tokens of rows with penalties
    counted_token: Ints = NO_INTS
    occurrences: Ints = NO_INTS  # in the output; 0 = in the prompt only
    repetition: Floats = NO_FLOATS  # [C] the row's penalty, beside each of its tokens
    frequency: Floats = NO_FLOATS
    presence: Floats = NO_FLOATS


NO_EDITS = LogitEdits()


@torch.inference_mode()
def apply_edits(logits: torch.Tensor, edits: LogitEdits) -> None:
    """logits [S, V] float32, changed in place. Order as vLLM's: allowed tokens, bad words, min_tokens, logit_bias,
    penalties."""
    if len(edits.limited):
        _limit(logits, edits)
    if len(edits.forbidden_row):
        known = edits.forbidden_token < logits.shape[1]
        logits[_index(edits.forbidden_row[known]), _index(edits.forbidden_token[known])] = -torch.inf
    if len(edits.bias_row):
        logits[_index(edits.bias_row), _index(edits.bias_token)] += torch.from_numpy(edits.bias).to(logits.device)
    if len(edits.counted_row):
        _penalize(logits, edits)


def _limit(logits: torch.Tensor, edits: LogitEdits) -> None:
    rows, tokens = _index(edits.allowed_row), _index(edits.allowed_token)
    kept = logits[rows, tokens]
    logits[_index(edits.limited)] = -torch.inf
    logits[rows, tokens] = kept


def _penalize(logits: torch.Tensor, edits: LogitEdits) -> None:
    """Repetition: positive logits are divided by it, others multiplied (Keskar et al. 2019, arXiv 1909.05858);
    frequency and presence as in the OpenAI API."""
    rows, tokens = _index(edits.counted_row), _index(edits.counted_token)
    values = logits[rows, tokens].cpu().numpy()
    values = np.where(values > 0, values / edits.repetition, values * edits.repetition)
    values -= edits.frequency * edits.occurrences.astype(np.float32)
    values -= edits.presence * (edits.occurrences > 0)
    logits[rows, tokens] = torch.from_numpy(values).to(logits.device)


def _index(entries: Ints) -> torch.Tensor:
    return torch.from_numpy(entries)
