"""Candidates: the most likely next tokens of beam search rows, with their log probabilities.

As in transformers, options that change logits (repetition_penalty, bad_words, ...) change log probabilities here: the
logits are normalised first.
"""

import numpy as np

from core.execution.plan import LogprobColumns
from core.sampling.logprobs import most_likely
from ipc.tables.arrays import Floats, Ints, Positions

#: Used instead of a sampled token: the row belongs to a beam search, which chooses its tokens.
NOT_DRAWN = -3


@np.errstate(all="ignore")  # rows that are not finite fail, and their candidates are dropped
def normalize(logits: Floats, rows: Ints, temperatures: Floats) -> None:
    """Turn these rows of logits [S, V] into log probabilities, in place.

    rows [n]: indices; temperatures [n]: logits are divided by them; 0 = 1.
    """
    for row, temperature in zip(rows.tolist(), temperatures.tolist(), strict=True):
        values = logits[row] / np.float32(temperature or 1.0)
        values -= values.max()
        total = np.exp(values).sum(dtype=np.float64)
        logits[row] = values - np.float32(np.log(total))


def gather_candidates(
    logprobs: Floats, rows: Ints, counts: Ints, in_plan: Ints, positions: Positions
) -> LogprobColumns:
    """Return the counts[i] most likely tokens of each of these rows of logprobs [S, V], ties by lower id.

    Forbidden tokens, whose log probability is minus infinity, are not candidates. rows, counts, in_plan, positions [n]:
    index of the row in logprobs, number of candidates, index in the plan's rows, and position of the token in the row.
    """
    counts = np.minimum(counts, logprobs.shape[1])
    tokens = [most_likely(logprobs[row], count) for row, count in zip(rows.tolist(), counts.tolist(), strict=True)]
    tokens = [ids[logprobs[row, ids] > -np.inf] for row, ids in zip(rows.tolist(), tokens, strict=True)]
    token_ids, counts = np.concatenate(tokens), np.array([len(ids) for ids in tokens])
    return LogprobColumns(
        rows=in_plan.astype(np.int32),
        positions=positions.astype(np.int32),
        counts=counts.astype(np.int32),
        ranks=np.ones(len(rows), np.int32),
        token_ids=token_ids.astype(np.int32),
        values=logprobs[rows.repeat(counts), token_ids],
    )
