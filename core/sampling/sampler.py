"""The sampler: one token for each row of logits, as a function of only that row, its parameters and its position.

The order is vLLM's: edits (core/sampling/logit_edits.py), temperature, min_p, top_k, top_p (core/sampling/filters.py),
draw. A draw takes the remaining token with the largest logit / temperature + Gumbel noise (kernels/gumbel.py), and the
lowest id on a tie.
"""

from typing import NamedTuple

import numpy as np

from core.sampling.edit_group import Edit
from core.sampling.filters import Candidates, Filters, leading, left, weights_above_min_p
from core.sampling.logit_edits import apply_edits, largest_after
from ipc.tables.arrays import NO_INT32S, Floats, Int32s, Ints, Rows, UInt64s
from kernels.cpu.sampling import CpuSampler
from kernels.gumbel import high_bits, noise, noise_bounds

#: The edits for a batch without options that change logits.
NO_EDITS: tuple[Edit, ...] = ()

#: Result for a row whose logits are not finite.
NOT_A_TOKEN = -1

#: Logits processed at once, in whole rows. It bounds temporary memory: about 40 bytes per logit.
_MAX_LOGITS = 1 << 20


class SamplingInputs(NamedTuple):
    """The sampling parameters of S rows, as columns [S], and the edits of their logits."""

    temperature: Floats  # 0 = greedy
    top_k: Ints  # 0 = all
    top_p: Floats  # (0, 1]
    min_p: Floats  # [0, 1]
    seed: UInt64s
    position: Ints  # index in the request's output of the token to draw
    choice: Ints  # index of the request's choice
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

    The result is NOT_A_TOKEN if the row's largest logit after the edits is NaN or infinite. kernel: the C sampler;
    None: NumPy. largest [S]: the result of sample_greedily() for the unedited logits, if known; or the token of a
    sample without edits at temperature 0. keeps_logits: False = the logits are not read afterwards, so rows whose token
    is known without edits are not edited.
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
    """Return the token ids [S] int32 of the largest logits, ties by lower id; NOT_A_TOKEN if not finite.

    This equals sample() if every temperature is 0 and there are no edits. The logits [S, V] are not changed.
    """
    if kernel is not None:
        return kernel.largest(logits)
    return _largest(logits) if len(logits) else NO_INT32S


def _largest(logits: Floats) -> Int32s:
    best, maximum = _best(logits)
    return np.where(np.isfinite(maximum), best, NOT_A_TOKEN).astype(np.int32)


def _best(logits: Floats) -> tuple[Ints, Floats]:
    """Return the index [S] of each row's largest logit, the first on a tie, and that logit. NaN counts as largest."""
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
    filters = Filters(inputs.top_k[rows], inputs.top_p[rows], inputs.min_p[rows])
    filtered = np.flatnonzero(drawn & filters.have_effect(vocab_size))
    for part in _parts(filtered, vocab_size):
        chosen = scaled[part]
        chosen[~left(chosen, filters.of(part))] = -np.inf
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
    """Return the tokens [n]. The full noise is only computed for tokens that can win by their high bits."""
    scaled[weights_above_min_p(scaled, maximum, inputs.min_p[rows]) == 0] = -np.inf
    high = high_bits(inputs.seed[rows], inputs.position[rows], inputs.choice[rows], scaled.shape[1])
    least, most = noise_bounds()
    enough = (scaled + least[high]).max(-1, keepdims=True)
    can_win = scaled + most[high] >= enough
    count = int(can_win.sum(-1).max())
    ids = np.argsort(~can_win, axis=-1, kind="stable")[:, :count]  # those that can, in order, then others
    return _winners(np.take_along_axis(scaled, ids, -1), ids, rows, inputs)


def _draw_from_largest(scaled: Floats, maximum: Floats, rows: Ints, top_k: Ints, inputs: SamplingInputs) -> Ints:
    """Return the tokens [n] of rows with top_k or top_p."""
    tokens = np.zeros(len(scaled), np.int64)
    for done, candidates, kept in leading(scaled, maximum, Filters(top_k, inputs.top_p[rows], inputs.min_p[rows])):
        tokens[done] = _draw(candidates, kept, rows[done], inputs)
    return tokens


def _winners(values: Floats, ids: Ints, rows: Rows, inputs: SamplingInputs) -> Ints:
    """Return the winner [n] among the tokens ids [n, m] with these logits / temperature. -inf never wins."""
    sums = values + noise(inputs.seed[rows], inputs.position[rows], inputs.choice[rows], ids)
    is_best = sums == sums.max(-1, keepdims=True)
    winners: Ints = np.where(is_best, ids, np.iinfo(np.int64).max).min(-1)
    return winners


def _draw(candidates: Candidates, kept: Ints, rows: Rows, inputs: SamplingInputs) -> Ints:
    """Draw a token [n] from the first kept[i] candidates of each row i."""
    values = candidates.values[:, : int(kept.max(initial=1))].copy()
    values[np.arange(values.shape[1]) >= kept[:, None]] = -np.inf
    return _winners(values, candidates.ids[:, : values.shape[1]], rows, inputs)
