"""Sampling by Triton: draw one token from each row of logits, as core/sampling/sampler.py does, without sorting.

A draw takes the token left with the largest logit / temperature + Gumbel noise, the lowest id of equals. top_k and
top_p leave the largest logits, ties by lower id. One program computes a row, so a token depends on its row alone. Sums
are float64.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from kernels.arrays import Int32s
from kernels.triton.device import power_of_2
from kernels.triton.gumbel import TOKENS_PER_BLOCK, noise_from
from kernels.triton.threshold_search import LOWEST_KEY, find_key, load_scaled, measure, ordered_key

_MAX_BLOCK = 4096

#: int32 words of a row's parameters: temperature, top_p, min_p (float32), top_k, position, choice, seed (low, high).
_NUM_WORDS = 8


@triton.jit
def _largest(row, vocab_size, BLOCK: tl.constexpr):
    """Return the largest logit, NaN if there is one, and its index: the first of equals."""
    best = tl.full((), -float("inf"), tl.float32)
    index = tl.zeros((), tl.int32)
    num_nan = tl.zeros((), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(row + at, mask=at < vocab_size, other=-float("inf"))
        is_nan = values != values
        num_nan += tl.sum(is_nan.to(tl.int32), 0)
        values = tl.where(is_nan, -float("inf"), values)
        block_best = tl.max(values, 0)
        first = tl.min(tl.where(values == block_best, at, vocab_size), 0).to(tl.int32)
        index = tl.where(block_best > best, first, index)
        best = tl.maximum(best, block_best)
    return tl.where(num_nan > 0, float("nan"), best), index


@triton.jit
def _race(row, vocab_size, temperature, maximum, min_p, low, cut, last_cut, stream, BLOCK: tl.constexpr):
    """Return the winner among the tokens with a key >= low that min_p leaves.

    Of the tokens with the key `cut`, those up to the id last_cut take part. stream: seed, position and choice.
    """
    best = tl.full((), -float("inf"), tl.float64)
    winner = tl.zeros((), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = load_scaled(row, at, vocab_size, temperature)
        key = ordered_key(values)
        left = (tl.exp(values - maximum) >= min_p) & (values > -float("inf")) & (key >= low)
        left = left & ((key != cut) | (at <= last_cut))
        sums = values.to(tl.float64) + noise_from(*stream, start, BLOCK)
        sums = tl.where(left, sums, -float("inf"))
        block_best = tl.max(sums, 0)
        first = tl.min(tl.where(sums == block_best, at, vocab_size), 0).to(tl.int32)
        winner = tl.where(block_best > best, first, winner)
        best = tl.maximum(best, block_best)
    return winner


@triton.jit
def _nth_of_key(row, vocab_size, temperature, key, n, BLOCK: tl.constexpr):
    """Return the id of the n-th token, from 0, whose scaled logit has this key."""
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
def _largest_left(row, vocab_size, temperature, maximum, min_p, top_k, top_p, BLOCK: tl.constexpr):
    """Return (low, cut, last_cut) as _race() takes them: what top_k and top_p leave."""
    low = tl.zeros((), tl.int64) + LOWEST_KEY
    if (top_k > 0) & (top_k < vocab_size):
        low = find_key(row, vocab_size, temperature, maximum, min_p, low, top_k.to(tl.float64), True, BLOCK)
    cut = low - 1  # the key that keeps only some of its tokens
    last_cut = tl.zeros((), tl.int32)
    if top_p < 1:
        # A token stays if those before it weigh less than goal.
        _, total = measure(row, vocab_size, temperature, maximum, min_p, low, BLOCK)
        goal = top_p.to(tl.float64) * total
        cut = find_key(row, vocab_size, temperature, maximum, min_p, low, goal * (1.0 - 2.0**-52), False, BLOCK)
        above_count, above = measure(row, vocab_size, temperature, maximum, min_p, cut + 1, BLOCK)
        count, weight = measure(row, vocab_size, temperature, maximum, min_p, cut, BLOCK)
        each = (weight - above) / tl.maximum(count - above_count, 1).to(tl.float64)
        wanted = tl.ceil((goal - above) / tl.maximum(each, 1e-300))
        num_cut = tl.minimum(tl.maximum(wanted, 1.0), (count - above_count).to(tl.float64)).to(tl.int64)
        last_cut = _nth_of_key(row, vocab_size, temperature, cut, num_cut - 1, BLOCK)
        low = cut
    return low, cut, last_cut


@triton.jit(do_not_specialize=["num_rows"])
def _sample(logits, words, tokens, vocab_size, num_rows, BLOCK: tl.constexpr):
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * vocab_size
    temperature = tl.load(words + index).to(tl.float32, bitcast=True)
    top_p = tl.load(words + num_rows + index).to(tl.float32, bitcast=True)
    min_p = tl.load(words + 2 * num_rows + index).to(tl.float32, bitcast=True)
    top_k = tl.load(words + 3 * num_rows + index)
    maximum, token = _largest(row, vocab_size, BLOCK)
    drawn = temperature > 0
    if drawn:
        maximum = tl.div_rn(maximum, temperature)
    finite = tl.abs(maximum) < float("inf")
    if drawn & finite:
        position = tl.load(words + 4 * num_rows + index)
        choice = tl.load(words + 5 * num_rows + index)
        seed_low = tl.load(words + 6 * num_rows + index).to(tl.uint32, bitcast=True).to(tl.uint64)
        seed_high = tl.load(words + 7 * num_rows + index).to(tl.uint32, bitcast=True).to(tl.uint64)
        seed = ((seed_high << 32) | seed_low).to(tl.int64, bitcast=True)
        low, cut, last = _largest_left(row, vocab_size, temperature, maximum, min_p, top_k, top_p, BLOCK)
        stream = seed, position, choice
        token = _race(row, vocab_size, temperature, maximum, min_p, low, cut, last, stream, BLOCK)
    tl.store(tokens + index, tl.where(finite, token, -1))


def pack_columns(
    *,
    temperature: NDArray[Any],
    top_k: NDArray[Any],
    top_p: NDArray[Any],
    min_p: NDArray[Any],
    seed: NDArray[Any],
    position: NDArray[Any],
    choice: NDArray[Any],
) -> Int32s:
    """Pack the parameters [S] of S rows into [words, S] int32 for the device."""
    words = np.empty((_NUM_WORDS, len(temperature)), np.int32)
    for index, column in enumerate((temperature, top_p, min_p)):
        words[index] = column.astype(np.float32).view(np.int32)
    words[3:6] = np.minimum(top_k, 2**31 - 1), position, choice
    words[6:] = seed.astype("<u8").view("<i4").reshape(-1, 2).T
    return words


def sample_tokens(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return token ids [S] int32 on the device; -1 where the largest scaled logit is no finite number.

    logits [S, V] float32 contiguous; words from pack_columns, on the device. A scaled logit is divided by the row's
    temperature.
    """
    assert logits.is_contiguous(), logits.stride()
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows:
        block = max(TOKENS_PER_BLOCK, min(_MAX_BLOCK, power_of_2(vocab_size)))
        _sample[(num_rows,)](logits, words, tokens, vocab_size, num_rows, BLOCK=block)
    return tokens
