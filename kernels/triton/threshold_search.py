"""Threshold search: finds what top-k and top-p keep of a row, without sorting; one program per row.

A search finds the key at which a count, or a sum of weights, over all larger logits exceeds a goal: 2 of a float's 32
bits in each pass. It ends as soon as the remaining tokens are known, which is long before the last bit unless logits
are equal.

A row's largest logits are in few groups of GROUP consecutive tokens: those with the largest maxima. If a row's goal is
reached within a few hundred groups, as usual, the passes go over their tokens, in registers; otherwise over the whole
row. Both give the same tokens. The sums are float64.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.triton.device import power_of_2
from kernels.triton.sampling_rows import load_scaled, maximum_of, number_of, ordered_key, parameters

#: Consecutive tokens per group: 128 bytes of logits.
GROUP = tl.constexpr(32)
#: The most groups in a short list, and how many are enough for a search by weight.
MOST_GROUPS = 256
SOME_GROUPS = 128
#: Tokens per step of a pass over a whole row, and warps per program.
BLOCK = 2048
NUM_WARPS = 16

#: Keys measured in a pass, for the next 2 bits.
_NUM_KEYS = tl.constexpr(4)


# fmt: off
@triton.jit
def _taken(values, maximum, min_p, low):
    """Return (keys, weights of the taken tokens, whether taken): min_p and the key `low` determine which are taken."""
    keys, weights = ordered_key(values), tl.exp(values - maximum)
    taken = (keys >= low) & (weights >= min_p) & (values > -float("inf"))
    return keys, tl.where(taken, weights, 0.0), taken


@triton.jit
def _measure_row(
    row, vocab_size, temperature, maximum, min_p, low, key, step, COUNTS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Return the number (COUNTS) or weight of the row's tokens with keys from key + i * step on, for i < _NUM_KEYS."""
    starts = key + tl.arange(0, _NUM_KEYS) * step
    sums = tl.zeros((_NUM_KEYS, BLOCK), tl.int32 if COUNTS else tl.float64)
    for start in range(0, vocab_size, BLOCK):
        values = load_scaled(row, start + tl.arange(0, BLOCK), vocab_size, temperature)
        keys, weights, taken = _taken(values, maximum, min_p, low)
        numbers = taken.to(tl.int32) if COUNTS else weights.to(tl.float64)
        sums += tl.where(keys[None, :] >= starts[:, None], numbers[None, :], 0)
    return tl.sum(sums, 1).to(tl.float64)


@triton.jit
def _measure_short(values, maximum, min_p, low, key, step, COUNTS: tl.constexpr):
    """Return the same as _measure_row() for these values [groups, GROUP]."""
    keys, weights, taken = _taken(values, maximum, min_p, low)
    numbers = taken.to(tl.int32) if COUNTS else weights.to(tl.float64)
    index = tl.arange(0, _NUM_KEYS)
    sums = tl.zeros((_NUM_KEYS,), tl.float64)
    for i in tl.static_range(_NUM_KEYS):
        mine = tl.sum(tl.sum(tl.where(keys >= key + i * step, numbers, 0), 1), 0).to(tl.float64)
        sums = tl.where(index == i, mine, sums)
    return sums


@triton.jit
def _find_key(
    row, vocab_size, temperature, maximum, min_p, low, goal, short, SHORT: tl.constexpr, COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the largest key such that at least goal tokens have that key or more (COUNTS), or weigh more than goal.

    The result is (key, above, is_exact); above: the measure of the tokens above the key. The key is 0 if there is none.
    It may be lower than the largest one, and is not exact, if that keeps the same tokens. short: values to search in
    (SHORT).
    """
    index = tl.arange(0, _NUM_KEYS)
    key = tl.zeros((), tl.int64)
    above = tl.zeros((), tl.float64)
    step = tl.full((), 1 << 30, tl.int64)
    is_open = True
    while is_open:
        if SHORT:
            sums = _measure_short(short, maximum, min_p, low, key, step, COUNTS)
        else:
            sums = _measure_row(row, vocab_size, temperature, maximum, min_p, low, key, step, COUNTS, BLOCK)
        enough = sums >= goal if COUNTS else sums > goal * (1.0 - 2.0**-52)
        best = tl.max(tl.where(enough, index, 0), 0)
        here = tl.sum(tl.where(index == best, sums, 0.0), 0)
        above = tl.where(best < _NUM_KEYS - 1, tl.sum(tl.where(index == best + 1, sums, 0.0), 0), above)
        key += best * step
        if COUNTS:
            is_known = here == goal
        else:  # one token, if all of this key's range weigh less than two of the lightest
            lightest = tl.exp(number_of(tl.maximum(key, low)) - maximum).to(tl.float64)
            is_known = here - above < 1.5 * lightest
        is_open = (step > 1) & (is_known == 0)
        step = step // _NUM_KEYS
    return key, above, step == 0


@triton.jit
def _nth_of_key(row, vocab_size, temperature, key, n, BLOCK: tl.constexpr):
    """Return the id of the n-th token, from 0, whose scaled logit has this key; vocab_size if there are fewer."""
    found = vocab_size + tl.zeros((), tl.int32)
    before = tl.zeros((), tl.int64)
    for start in range(0, vocab_size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = load_scaled(row, at, vocab_size, temperature)
        same = ((ordered_key(values) == key) & (at < vocab_size)).to(tl.int64)
        rank = before + tl.cumsum(same, 0) - 1
        found = tl.minimum(found, tl.min(tl.where((same > 0) & (rank == n), at, vocab_size), 0).to(tl.int32))
        before += tl.sum(same, 0)
    return found


@triton.jit
def _list_groups(maxima, listed, num_groups, wanted, GROUPS: tl.constexpr, MOST: tl.constexpr):
    """List the groups with the largest maxima, at least `wanted`. Return their number and their smallest maximum.

    maxima [num_groups] float32; listed [MOST] int32. There are more than MOST only if maxima are equal.
    """
    group = tl.arange(0, GROUPS)
    keys = ordered_key(tl.load(maxima + group, mask=group < num_groups, other=-float("inf")))
    keys = tl.where(group < num_groups, keys, -1)
    low = tl.zeros((), tl.int64)
    high = tl.max(keys, 0)
    count = num_groups
    while (low < high) & (count > MOST):
        middle = low + (high - low + 1) // 2
        number = tl.sum((keys >= middle).to(tl.int32), 0)
        low = tl.where(number >= wanted, middle, low)
        count = tl.where(number >= wanted, number, count)
        high = tl.where(number >= wanted, high, middle - 1)
    is_listed = keys >= low
    rank = tl.cumsum(is_listed.to(tl.int32), 0) - 1
    tl.store(listed + rank, group, mask=is_listed & (rank < MOST))
    tl.debug_barrier()
    return count, low


@triton.jit
def _load_groups(row, listed, count, vocab_size, temperature, MOST: tl.constexpr):
    """Load the scaled logits of the first `count` listed groups: [MOST, GROUP], -inf after them."""
    number = tl.arange(0, MOST)
    group = tl.load(listed + number, mask=number < count, other=0)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return load_scaled(row, tl.where((number < count)[:, None], at, vocab_size), vocab_size, temperature)


@triton.jit
def _total(row, vocab_size, temperature, maximum, min_p, low, BLOCK: tl.constexpr):
    """Return the weight of all taken tokens."""
    sums = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, vocab_size, BLOCK):
        values = load_scaled(row, start + tl.arange(0, BLOCK), vocab_size, temperature)
        _keys, weights, _taken_ones = _taken(values, maximum, min_p, low)
        sums += weights.to(tl.float64)
    return tl.sum(sums, 0)


@triton.jit
def _top_k_key(row, vocab_size, temperature, maximum, min_p, top_k, short, fits, first, BLOCK: tl.constexpr):
    """Return the key from which on top_k keeps tokens.

    short: the values of the short list, which has all tokens from the key `first` on; fits: there are at least top_k.
    """
    goal = top_k.to(tl.float64)
    if fits:
        key, _above, _exact = _find_key(
            row, vocab_size, temperature, maximum, min_p, first, goal, short, True, True, BLOCK,
        )
        key = tl.maximum(key, first)
    else:
        key, _above, _exact = _find_key(
            row, vocab_size, temperature, maximum, min_p, tl.zeros((), tl.int64), goal, short, False, True, BLOCK,
        )
    return key


@triton.jit
def _top_p_cut(
    row, vocab_size, temperature, maximum, min_p, top_p, low, short, fits, first, BLOCK: tl.constexpr,
):
    """Return (low, cut, last_cut) of top_p among the tokens from the key `low` on; see Thresholds."""
    _keys, weights, _taken_ones = _taken(short, maximum, min_p, tl.maximum(low, first))
    listed = tl.sum(tl.sum(weights.to(tl.float64), 1), 0)
    total = listed
    if (low < first) | (fits == 0):
        total = _total(row, vocab_size, temperature, maximum, min_p, low, BLOCK)
    goal = top_p.to(tl.float64) * total
    if fits & (listed > goal * (1.0 - 2.0**-52)):
        low = tl.maximum(low, first)
        key, above, is_exact = _find_key(
            row, vocab_size, temperature, maximum, min_p, low, goal, short, True, False, BLOCK,
        )
    else:
        key, above, is_exact = _find_key(
            row, vocab_size, temperature, maximum, min_p, low, goal, short, False, False, BLOCK,
        )
    low = tl.maximum(low, key)
    cut = tl.zeros((), tl.int64) - 1
    last_cut = tl.zeros((), tl.int32)
    if is_exact:
        # A token is kept if those before it weigh less than the goal. Tokens with the same key weigh the same.
        each = tl.exp(number_of(low) - maximum).to(tl.float64)
        kept = tl.maximum(tl.ceil((goal - above) / tl.maximum(each, 1e-300)), 1.0)
        cut = low
        nth = tl.minimum(kept, 2147483647.0).to(tl.int64) - 1
        last_cut = _nth_of_key(row, vocab_size, temperature, cut, nth, BLOCK)
    return low, cut, last_cut


@triton.jit(do_not_specialize=["num_rows"])
def search_kernel(
    logits, words, largest, maxima, listed, lows, cuts, last_cuts, vocab_size, num_rows, num_pieces, num_groups,
    BLOCK: tl.constexpr, PIECES: tl.constexpr, GROUPS: tl.constexpr, MOST: tl.constexpr, SOME: tl.constexpr,
):
    """Find what top_k and top_p keep of each row."""
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * vocab_size
    temperature, top_p, min_p, top_k = parameters(words, index, num_rows, vocab_size)
    maximum, _ = maximum_of(largest + index * num_pieces, num_pieces, PIECES)
    maximum = tl.div_rn(maximum, tl.where(temperature > 0, temperature, 1.0))
    low = tl.zeros((), tl.int64)
    cut = low - 1
    last_cut = tl.zeros((), tl.int32)
    searches = (temperature > 0) & ((top_k > 0) | (top_p < 1))
    if searches & (tl.abs(maximum) < float("inf")):
        of_row, ids = maxima + index.to(tl.int64) * num_groups, listed + index * MOST
        count, least = _list_groups(of_row, ids, num_groups, tl.maximum(top_k, SOME), GROUPS, MOST)
        fits = count <= MOST
        short = _load_groups(row, ids, tl.where(fits, count, 0), vocab_size, temperature, MOST)
        # The smallest key for which the short list has all tokens. Scaling keeps the order.
        first = tl.where(least > 0, ordered_key(tl.div_rn(number_of(least), temperature)), 0)
        if top_k > 0:
            has_enough = fits & (top_k <= count)
            low = _top_k_key(row, vocab_size, temperature, maximum, min_p, top_k, short, has_enough, first, BLOCK)
        if top_p < 1:
            low, cut, last_cut = _top_p_cut(
                row, vocab_size, temperature, maximum, min_p, top_p, low, short, fits, first, BLOCK,
            )
    tl.store(lows + index, low)
    tl.store(cuts + index, cut)
    tl.store(last_cuts + index, last_cut)
# fmt: on


class Thresholds(NamedTuple):
    """What top_k and top_p keep of S rows: the tokens from a key on; of one key, only those up to an id."""

    lows: torch.Tensor  # [S] int64
    cuts: torch.Tensor  # [S] int64, the key of which only some tokens are kept; -1 = none
    last_cuts: torch.Tensor  # [S] int32, the last of these

    @classmethod
    def allocate(cls, num_rows: int, device: torch.device) -> "Thresholds":
        """Allocate the columns, uninitialised."""
        lows, cuts = (torch.empty(num_rows, dtype=torch.int64, device=device) for _ in range(2))
        return cls(lows, cuts, torch.empty(num_rows, dtype=torch.int32, device=device))


def find_thresholds(
    logits: torch.Tensor, words: torch.Tensor, largest: torch.Tensor, maxima: torch.Tensor, found: Thresholds
) -> None:
    """Find the thresholds of all rows.

    logits [S, V] float32; words: see pack_columns(); largest [S, P], maxima [S, groups]: the largest logit of each
    piece and of each group of GROUP tokens; the last group may have fewer.
    """
    num_rows, vocab_size = logits.shape
    num_pieces, num_groups = largest.shape[1], maxima.shape[1]
    listed = torch.empty((num_rows, MOST_GROUPS), dtype=torch.int32, device=logits.device)
    search_kernel[(num_rows,)](
        logits, words, largest, maxima, listed, *found, vocab_size, num_rows, num_pieces, num_groups,
        BLOCK=BLOCK, PIECES=power_of_2(num_pieces), GROUPS=power_of_2(num_groups), MOST=MOST_GROUPS, SOME=SOME_GROUPS,
        num_warps=NUM_WARPS,
    )  # fmt: skip
