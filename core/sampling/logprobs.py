"""Log probabilities of a token and of its row's most likely tokens. A row's bits do not depend on other rows."""

import numpy as np

from core.execution.plan import LogprobColumns
from ipc.tables.arrays import AnyInts, Doubles, Floats, Ints, Positions, Rows

#: Group size: only the largest logit of each group is looked at first when searching for a row's most likely tokens.
_GROUP = 32


@np.errstate(all="ignore")  # rows that are not finite give NaN, and the scheduler drops them
def gather_logprobs(
    logits: Floats,
    tokens: AnyInts,
    num_top: AnyInts,
    rows: Rows,
    positions: Positions,
    *,
    normalized: bool = True,
) -> LogprobColumns:
    """Return the log probabilities of each row's token and of its most likely tokens.

    logits [L, V] float32; tokens [L] int; num_top [L] int: how many of the most likely tokens, at most V. rows,
    positions [L]: copied to the result. normalized: values are log probabilities; otherwise the unchanged logits.

    A row's entries are its token, then its most likely tokens in descending order, ties by lower id. The token's rank
    is the number of tokens that are at least as likely, as in vLLM.
    """
    each, vocab_size = np.arange(len(logits)), logits.shape[1]
    ranks = (logits >= logits[each, tokens][:, None]).sum(-1)
    base = _log_totals(logits) if normalized else np.zeros(len(logits))
    width = np.minimum(num_top, vocab_size)
    entry_row = [each]  # row of every entry; entry_token: its token
    entry_token = [tokens.astype(np.int64)]
    for count in np.unique(width[width > 0]).tolist():
        part = np.flatnonzero(width == count)
        entry_row.append(part.repeat(count))
        entry_token += [most_likely(logits[row], count) for row in part]
    row, token = np.concatenate(entry_row), np.concatenate(entry_token)
    order = np.argsort(row, kind="stable")
    row, token = row[order], token[order]
    values = logits[row, token].astype(np.float64) - base[row]
    return LogprobColumns(
        rows=rows.astype(np.int32),
        positions=positions.astype(np.int32),
        counts=np.bincount(row, minlength=len(tokens)).astype(np.int32),
        ranks=ranks.astype(np.int32),
        token_ids=token.astype(np.int32),
        values=values.astype(np.float32),
    )


def most_likely(logits: Floats, count: int) -> Ints:
    """Return the ids of the count largest of these logits [V] in descending order, ties by lower id.

    NaN counts as the smallest.
    """
    numbers = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    candidates = np.flatnonzero(numbers >= _bound(numbers, count))
    order = np.lexsort((candidates, -numbers[candidates]))
    return candidates[order[:count]]


def _bound(logits: Floats, count: int) -> np.float32:
    """Return a number that at least `count` of these logits [V] reach, and not many more.

    At least that many reach the count-th largest of the group maxima, because each group contributes its own.
    """
    whole = len(logits) // _GROUP
    if whole < count:
        return np.float32(-np.inf)
    maxima = logits[: whole * _GROUP].reshape(whole, _GROUP).max(-1)
    bound: np.float32 = np.partition(maxima, whole - count)[whole - count]
    return bound


def _log_totals(logits: Floats) -> Doubles:
    """Return log(sum(exp(logits))) of each row [L], float64; row by row, so that no row depends on another."""
    return np.array([_log_total(row) for row in logits], np.float64)


def _log_total(logits: Floats) -> float:
    maximum = logits.max()
    return float(np.log(np.exp(logits - maximum).sum(dtype=np.float64)) + maximum)
