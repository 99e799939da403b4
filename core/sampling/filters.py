"""The filters min_p, top_k and top_p in NumPy: which tokens of a row they keep.

Rows are not sorted completely. A row's largest logits are taken in buckets of growing size, until its parameters and
logits show that a bucket is large enough.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ipc.tables.arrays import NO_INTS, Bools, Doubles, Floats, Ints

#: Sizes of the candidate prefilter. After the last one comes the whole vocabulary.
BUCKETS = (64, 256, 1024, 4096)
#: Group size: only the largest value of each group is looked at first.
_GROUP = 64


class Filters(NamedTuple):
    """The filters of n rows, as columns [n]."""

    top_k: Ints  # 0, or at least the number of tokens: all
    top_p: Floats  # (0, 1]
    min_p: Floats  # [0, 1]

    def of(self, rows: Ints) -> "Filters":
        """Return the filters of some rows, by index."""
        return Filters(self.top_k[rows], self.top_p[rows], self.min_p[rows])

    def have_effect(self, vocab_size: int) -> Bools:
        """Return whether each row's [n] filters can exclude a token."""
        has_top_k = (self.top_k > 0) & (self.top_k < vocab_size)
        effect: Bools = has_top_k | (self.top_p < 1) | (self.min_p > 0)
        return effect


class Candidates(NamedTuple):
    """The largest logits [n, bucket] of n rows, in descending order, ties by lower id."""

    values: Floats  # logits / temperature
    ids: Ints
    weights: Doubles  # exp(value - the row's maximum)

    def of(self, rows: Bools) -> "Candidates":
        """Return the candidates of some rows."""
        return Candidates(self.values[rows], self.ids[rows], self.weights[rows])


def left(scaled: Floats, filters: Filters) -> Bools:
    """Return which tokens [n, V] the filters keep of logits / temperature [n, V]; never one with -inf."""
    is_left = np.zeros(scaled.shape, np.bool_)
    for row, values in enumerate(scaled):
        is_left[row, left_of_row(values, *filters.of(np.array([row])))] = True
    return is_left


def left_of_row(scaled: Floats, top_k: Ints, top_p: Floats, min_p: Floats) -> Ints:
    """Return the ids of the tokens that the filters [1] keep of one row's logits / temperature [V].

    Those of equal logits ascend.     There are none if the largest is not finite: the row fails.
    """
    largest = scaled.max()
    if not np.isfinite(largest):
        return NO_INTS
    is_left = scaled > -np.inf
    if 0 < top_k[0] < len(scaled):
        is_left &= scaled >= _kth_largest(scaled, int(top_k[0]))
    if min_p[0] > 0:
        is_left &= np.exp(scaled - largest) >= min_p[0]
    ids = np.flatnonzero(is_left)
    if top_p[0] == 1:
        return ids
    # The others only depend on the order of logits, and each keeps the largest, so top_p is only evaluated on what they
    # keep.
    ((_, candidates, kept),) = leading(scaled[ids][None], np.array([[largest]]), Filters(top_k, top_p, min_p))
    return ids[candidates.ids[0, : kept[0]]]


def _kth_largest(values: Floats, k: int) -> np.float32:
    """Return the k-th largest of values [V]. The largest values of k groups give a lower bound."""
    whole = len(values) // _GROUP * _GROUP
    if k <= whole // _GROUP:
        maxima = values[:whole].reshape(-1, _GROUP).max(1)
        values = values[values >= np.partition(maxima, -k)[-k]]
    found: np.float32 = np.partition(values, -k)[-k]
    return found


def weights_above_min_p(scaled: Floats, maximum: Floats, min_p: Floats) -> Doubles:
    """Return exp(scaled - maximum) [n, V], with 0 below the row's min_p (the largest weight is 1)."""
    weights = np.exp(scaled - maximum)  # float32, as in the C kernel
    weights[weights < min_p[:, None]] = 0
    exact: Doubles = weights.astype(np.float64)
    return exact


def leading(scaled: Floats, maximum: Floats, filters: Filters) -> Iterator[tuple[Ints, Candidates, Ints]]:
    """Yield (rows, candidates, kept): the filters keep the first kept[i] candidates of rows[i]. Each row occurs once.

    scaled: logits / temperature [n, V], maximum: the largest of each row [n, 1]. Each row tries the buckets in order,
    from the first that can hold its top_k, until one is large enough.
    """
    num_rows, vocab_size = scaled.shape
    top_k = np.where(filters.top_k < vocab_size, filters.top_k, 0)
    total = np.zeros(num_rows)
    need_total = np.flatnonzero(top_k == 0)
    if len(need_total):
        weights = weights_above_min_p(scaled[need_total], maximum[need_total], filters.min_p[need_total])
        total[need_total] = weights.sum(-1)
    waiting = np.arange(num_rows)
    for bucket in (*(size for size in BUCKETS if size < vocab_size), vocab_size):
        # The bucket is larger than top_k: the value after the last one shows whether equal values were cut off.
        ready = waiting[(top_k[waiting] < bucket) | (bucket == vocab_size)]
        if len(ready) == 0:
            continue
        chosen = scaled[ready]
        candidates = _candidates(chosen, maximum[ready], _largest_ids(chosen, bucket))
        kept, enough = _keep(candidates, top_k[ready], total[ready], filters.top_p[ready], filters.min_p[ready])
        enough |= bucket == vocab_size
        if enough.any():
            yield ready[enough], candidates.of(enough), kept[enough]
        waiting = np.setdiff1d(waiting, ready[enough], assume_unique=True)
        if len(waiting) == 0:
            break


def _largest_ids(scaled: Floats, count: int) -> Ints:
    """Return the ids [n, count] of each row's largest logits [n, V] in descending order, ties by lower id.

    Some tokens equal to the last one's logit may be missing.
    """
    if count == scaled.shape[1]:
        return np.argsort(-scaled, axis=-1, kind="stable")
    ids = np.sort(np.argpartition(-scaled, count - 1, axis=-1)[:, :count], axis=-1)
    order = np.argsort(-np.take_along_axis(scaled, ids, -1), axis=-1, kind="stable")
    return np.take_along_axis(ids, order, -1)


def _candidates(scaled: Floats, maximum: Floats, ids: Ints) -> Candidates:
    """Return the candidates with these ids [n, bucket] of logits [n, V] whose maximum is [n, 1]."""
    values = np.take_along_axis(scaled, ids, -1)
    return Candidates(values, ids, np.exp(values - maximum).astype(np.float64))


def _keep(
    candidates: Candidates,
    top_k: Ints,
    total: Doubles,
    top_p: Floats,
    min_p: Floats,
) -> tuple[Ints, Bools]:
    """Return (kept, enough) [n]: how many of the first candidates are kept, and whether the bucket was large enough.

    Every filter keeps a prefix of the candidates. The bucket is not large enough if a token outside it may have the
    value of the last kept candidate.
    """
    values, weights = candidates.values, candidates.weights
    rows = np.arange(len(values))
    bucket = values.shape[1]
    allowed = (weights >= min_p[:, None]) & (values > -np.inf)
    count = allowed.sum(-1)
    kth = values[rows, np.minimum(np.where(top_k > 0, top_k, bucket), bucket) - 1]
    by_k = np.where(top_k > 0, (allowed & (values >= kth[:, None])).sum(-1), count)
    cumulative = np.cumsum(weights, -1)
    total = np.where(top_k > 0, cumulative[rows, by_k - 1], total)
    # A token is kept if the tokens before it have less than top_p in total. The first is always kept, as in vLLM.
    by_p = ((cumulative - weights) < top_p[:, None] * total[:, None]).sum(-1)
    kept = np.where(top_p < 1, np.clip(by_p, 1, by_k), by_k)
    last = values[:, -1]
    enough = (values[rows, kept - 1] > last) & ((top_k == 0) | (values[rows, by_k - 1] > last))
    return kept, enough | (last == -np.inf)
