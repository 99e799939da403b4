"""The sampler: one token for each row of logits, a function of that row, its parameters and its position alone.

The order is vLLM's: edits (core/sampling/logit_edits.py), temperature, min_p, top_k, top_p, draw. A draw takes the
remaining token with the largest logit / temperature + Gumbel noise (kernels/gumbel.py), the lowest id of equals. A row
with top_k or top_p is not sorted as a whole. Its largest logits are taken in buckets of growing size, until its own
parameters and logits show that a bucket is large enough.
"""

from typing import NamedTuple

import numpy as np

from core.sampling.edit_group import Edit
from core.sampling.logit_edits import apply_edits, largest_after
from ipc.tables.arrays import NO_INT32S, Bools, Doubles, Floats, Int32s, Ints, Rows, UInt64s
from kernels.cpu.sampling import CpuSampler
from kernels.gumbel import LEAST_NOISE, MOST_NOISE, high_bits, noise

#: The edits of a batch without options that change logits.
NO_EDITS: tuple[Edit, ...] = ()

#: Result of a row whose logits are not finite numbers.
NOT_A_TOKEN = -1

#: Sizes of the candidate prefilter; after the last one comes the whole vocabulary.
BUCKETS = (64, 256, 1024, 4096)

#: Logits processed at once, in whole rows. It bounds temporary memory: about 40 bytes a logit.
_MAX_LOGITS = 1 << 20


class SamplingInputs(NamedTuple):
    """The sampling parameters of S rows, as columns [S], and the edits of their logits."""

    temperature: Floats  # 0 = greedy
    top_k: Ints  # 0 = all
    top_p: Floats  # (0, 1]
    min_p: Floats  # [0, 1]
    seed: UInt64s
    position: Ints  # index in the request's output of the token to draw
    choice: Ints  # number of the request's choice
    edits: tuple[Edit, ...] = NO_EDITS


def sample(
    logits: Floats,
    inputs: SamplingInputs,
    kernel: CpuSampler | None = None,
    largest: Int32s | None = None,
    *,
    keeps_logits: bool = True,
) -> Int32s:
    """Return the token ids [S] int32 sampled from logits [S, V] float32, which are overwritten.

    The result is NOT_A_TOKEN where the row's largest logit after the edits is NaN or infinite. kernel: the C sampler;
    None: NumPy. largest [S]: the result of sample_greedily() for the unedited logits, if it is known; or the token of a
    sample without edits at temperature 0. keeps_logits: False = nobody reads the logits afterwards, so rows whose token
    is known without them are not edited.
    """
    if len(logits) == 0:
        return NO_INT32S
    temperature, edits = inputs.temperature, inputs.edits
    if edits and largest is not None:
        largest = largest_after(largest, edits)
        is_open = (largest < 0) | (temperature > 0)
        if not keeps_logits and not is_open.any():
            return largest
        edits = edits if keeps_logits or is_open.all() else tuple([edit.only(is_open) for edit in edits])
    apply_edits(logits, edits)
    if kernel is None:
        return _draw_tokens(logits, inputs)
    columns = (inputs.top_k, inputs.top_p, inputs.min_p, inputs.seed, inputs.position, inputs.choice)
    return kernel(logits, (temperature, *columns), largest)


def sample_greedily(logits: Floats, kernel: CpuSampler | None = None) -> Int32s:
    """Return the token ids [S] int32 of the largest logits, ties by lower id; NOT_A_TOKEN where not finite.

    This equals sample() where every temperature is 0 and there are no edits. The logits [S, V] are not changed.
    """
    if kernel is not None:
        return kernel.largest(logits)
    return _largest(logits) if len(logits) else NO_INT32S


def _largest(logits: Floats) -> Int32s:
    best, maximum = _best(logits)
    return np.where(np.isfinite(maximum), best, NOT_A_TOKEN).astype(np.int32)


def _best(logits: Floats) -> tuple[Ints, Floats]:
    """Return the index [S] of each row's largest logit, the first of equals, and that logit; NaN counts as largest."""
    best = logits.argmax(-1)
    return best, logits[np.arange(len(logits)), best]


@np.errstate(all="ignore")  # rows that are not finite are left out
def _draw_tokens(logits: Floats, inputs: SamplingInputs) -> Int32s:
    vocab_size = logits.shape[1]
    best, maximum = _best(logits)
    drawn = inputs.temperature > 0
    finite = np.isfinite(maximum / np.where(drawn, inputs.temperature, np.float32(1)))
    tokens = np.where(finite, best, NOT_A_TOKEN)
    drawn &= finite
    has_top_k = (inputs.top_k > 0) & (inputs.top_k < vocab_size)
    sorts = has_top_k | (inputs.top_p < 1)
    for rows in _parts(np.flatnonzero(drawn & ~sorts), vocab_size):
        tokens[rows] = _draw_from_all(*_scaled(logits, maximum, rows, inputs), rows, inputs)
    for rows in _parts(np.flatnonzero(drawn & sorts), vocab_size):
        top_k = np.where(has_top_k[rows], inputs.top_k[rows], 0)
        tokens[rows] = _draw_from_largest(*_scaled(logits, maximum, rows, inputs), rows, top_k, inputs)
    return tokens.astype(np.int32)


@np.errstate(all="ignore")  # a row that is not finite is reported by sample()
def processed_logits(logits: Floats, rows: Rows, inputs: SamplingInputs) -> Floats:
    """Return the logits [n, V] from which sample() drew the tokens of these rows [n].

    logits [S, V]: as sample() leaves them. They are divided by the temperature, and -inf for the tokens that min_p,
    top_k and top_p exclude. A greedy row is returned without these changes.
    """
    vocab_size = logits.shape[1]
    drawn = inputs.temperature[rows] > 0
    divisor: Floats = np.where(drawn, inputs.temperature[rows], np.float32(1))
    scaled = logits[rows] / divisor[:, None]
    top_k = np.where(inputs.top_k[rows] < vocab_size, inputs.top_k[rows], 0)
    filters = drawn & ((top_k > 0) | (inputs.top_p[rows] < 1) | (inputs.min_p[rows] > 0))
    for part in _parts(np.flatnonzero(filters), vocab_size):
        chosen, top_p, min_p = scaled[part], inputs.top_p[rows[part]], inputs.min_p[rows[part]]
        ids = np.argsort(-chosen, axis=-1, kind="stable")  # ties by lower id, as in a draw
        candidates = _candidates(chosen, chosen.max(-1, keepdims=True), ids)
        total = _weights_above_min_p(chosen, candidates.values[:, :1], min_p).sum(-1)
        kept, _ = _keep(candidates, top_k[part], total, top_p, min_p)
        left_out = np.arange(vocab_size) >= kept[:, None]
        np.put_along_axis(chosen, ids, np.where(left_out, np.float32(-np.inf), candidates.values), -1)
        scaled[part] = chosen
    return scaled


def _parts(rows: Ints, vocab_size: int) -> list[Ints]:
    size = max(1, _MAX_LOGITS // vocab_size)
    return [rows[first : first + size] for first in range(0, len(rows), size)]


def _scaled(logits: Floats, maximum: Floats, rows: Ints, inputs: SamplingInputs) -> tuple[Floats, Floats]:
    """Return the logits divided by the temperature [n, V] and their maximum [n, 1] of these rows [n]."""
    temperature = inputs.temperature[rows, None]
    return logits[rows] / temperature, maximum[rows, None] / temperature


def _draw_from_all(scaled: Floats, maximum: Floats, rows: Rows, inputs: SamplingInputs) -> Ints:
    """Return the tokens [n]. Only those that can win with their high bits get all their noise computed."""
    scaled[_weights_above_min_p(scaled, maximum, inputs.min_p[rows]) == 0] = -np.inf
    high = high_bits(inputs.seed[rows], inputs.position[rows], inputs.choice[rows], scaled.shape[1])
    enough = (scaled + LEAST_NOISE[high]).max(-1, keepdims=True)
    can_win = scaled + MOST_NOISE[high] >= enough
    count = int(can_win.sum(-1).max())
    ids = np.argsort(~can_win, axis=-1, kind="stable")[:, :count]  # those that can, in order, and others
    return _winners(np.take_along_axis(scaled, ids, -1), ids, rows, inputs)


def _winners(values: Floats, ids: Ints, rows: Rows, inputs: SamplingInputs) -> Ints:
    """Return the winner [n] among the tokens ids [n, m] with these logits / temperature; -inf takes no part."""
    sums = values + noise(inputs.seed[rows], inputs.position[rows], inputs.choice[rows], ids)
    is_best = sums == sums.max(-1, keepdims=True)
    winners: Ints = np.where(is_best, ids, np.iinfo(np.int64).max).min(-1)
    return winners


def _weights_above_min_p(scaled: Floats, maximum: Floats, min_p: Floats) -> Doubles:
    """Return exp(scaled - maximum) [n, V], with 0 below the row's min_p (the largest weight is 1)."""
    weights = np.exp(scaled - maximum)  # float32, as in the C kernel
    weights[weights < min_p[:, None]] = 0
    exact: Doubles = weights.astype(np.float64)
    return exact


def _draw_from_largest(scaled: Floats, maximum: Floats, rows: Ints, top_k: Ints, inputs: SamplingInputs) -> Ints:
    """Return the tokens [n]. Each row tries the buckets, from the first that can hold its top_k, until one suffices."""
    num_rows, vocab_size = scaled.shape
    tokens = np.zeros(num_rows, np.int64)
    total = np.zeros(num_rows)
    need_total = np.flatnonzero(top_k == 0)
    if len(need_total):
        weights = _weights_above_min_p(scaled[need_total], maximum[need_total], inputs.min_p[rows[need_total]])
        total[need_total] = weights.sum(-1)
    left = np.arange(num_rows)
    for bucket in (*(size for size in BUCKETS if size < vocab_size), vocab_size):
        # The bucket is larger than top_k: the value after the last one shows whether ties with it were cut off.
        ready = left[(top_k[left] < bucket) | (bucket == vocab_size)]
        if len(ready) == 0:
            continue
        chosen, part = scaled[ready], rows[ready]
        candidates = _candidates(chosen, maximum[ready], _largest_ids(chosen, bucket))
        kept, enough = _keep(candidates, top_k[ready], total[ready], inputs.top_p[part], inputs.min_p[part])
        enough |= bucket == vocab_size
        tokens[ready[enough]] = _draw(candidates.select(enough), kept[enough], part[enough], inputs)
        left = np.setdiff1d(left, ready[enough], assume_unique=True)
        if len(left) == 0:
            break
    return tokens


def _largest_ids(scaled: Floats, count: int) -> Ints:
    """Return the ids [n, count] of each row's largest logits [n, V] in descending order; ties may be cut off."""
    ids = np.argpartition(-scaled, count - 1, axis=-1)[:, :count]
    order = np.argsort(-np.take_along_axis(scaled, ids, -1), axis=-1)
    return np.take_along_axis(ids, order, -1)


class _Candidates(NamedTuple):
    """The largest logits [n, bucket] of n rows, in descending order."""

    values: Floats  # scaled logits
    ids: Ints
    weights: Doubles  # exp(value - the row's maximum)

    def select(self, rows: Bools) -> "_Candidates":
        return _Candidates(self.values[rows], self.ids[rows], self.weights[rows])


def _candidates(scaled: Floats, maximum: Floats, ids: Ints) -> _Candidates:
    """Return the candidates with these ids [n, bucket] of logits [n, V] whose maximum is [n, 1]."""
    values = np.take_along_axis(scaled, ids, -1)
    return _Candidates(values, ids, np.exp(values - maximum).astype(np.float64))


def _keep(
    candidates: _Candidates,
    top_k: Ints,
    total: Doubles,
    top_p: Floats,
    min_p: Floats,
) -> tuple[Ints, Bools]:
    """Return (kept, enough) [n]: how many of the first candidates remain, and whether the bucket was large enough.

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
    # A token remains if the tokens before it have less than top_p together. The first always remains, as in vLLM.
    by_p = ((cumulative - weights) < top_p[:, None] * total[:, None]).sum(-1)
    kept = np.where(top_p < 1, np.clip(by_p, 1, by_k), by_k)
    last = values[:, -1]
    enough = (values[rows, kept - 1] > last) & ((top_k == 0) | (values[rows, by_k - 1] > last))
    return kept, enough | (last == -np.inf)


def _draw(candidates: _Candidates, kept: Ints, rows: Rows, inputs: SamplingInputs) -> Ints:
    """Draw a token [n] from the first kept[i] candidates of each row i."""
    order = np.lexsort((candidates.ids, -candidates.values), axis=-1)  # _largest_ids() leaves ties in any order
    order = order[:, : int(kept.max(initial=1))]
    values = np.take_along_axis(candidates.values, order, -1)
    values[np.arange(order.shape[1]) >= kept[:, None]] = -np.inf
    return _winners(values, np.take_along_axis(candidates.ids, order, -1), rows, inputs)
