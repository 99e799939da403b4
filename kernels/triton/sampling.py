"""Sampling in Triton: draws one token from each row of logits, like core/sampling/sampler.py, without sorting.

A draw takes the remaining token with the largest logit / temperature + Gumbel noise, and the lowest id on a tie. top_k
and top_p keep the largest logits, ties by lower id. A row is split into pieces of a fixed length, with one program
each, so that a single row keeps the device busy too; a token only depends on its row. Greedy rows take two launches,
draws one more, and top_k and top_p another one.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from kernels.arrays import Int32s
from kernels.rounding import ceil_div
from kernels.triton.device import power_of_2
from kernels.triton.gumbel import TOKENS_PER_BLOCK, noise_from
from kernels.triton.sampling_rows import first_largest, load_scaled, maximum_of, ordered_key, parameters
from kernels.triton.threshold_search import GROUP, Thresholds, find_thresholds

#: Tokens per piece. It is fixed, so that the order of summation only depends on the row.
MAX_BLOCK = 2048
#: A whole group, and a multiple of the number of tokens that share Philox numbers.
_MIN_BLOCK = max(GROUP.value, TOKENS_PER_BLOCK)
NUM_WARPS = 8

#: int32 words of a row's parameters: temperature, top_p, min_p (float32), top_k, position, choice, seed (low, high).
_NUM_WORDS = 8


# fmt: off
@triton.jit
def _race(values, left, words, index, num_rows, start, vocab_size, BLOCK: tl.constexpr):
    """Return the largest value + noise of a piece's remaining tokens, and the first token that has it."""
    position = tl.load(words + 4 * num_rows + index)
    choice = tl.load(words + 5 * num_rows + index)
    seed_low = tl.load(words + 6 * num_rows + index).to(tl.uint32, bitcast=True).to(tl.uint64)
    seed_high = tl.load(words + 7 * num_rows + index).to(tl.uint32, bitcast=True).to(tl.uint64)
    seed = ((seed_high << 32) | seed_low).to(tl.int64, bitcast=True)
    sums = values.to(tl.float64) + noise_from(seed, position, choice, start, BLOCK)
    return first_largest(tl.where(left, sums, -float("inf")), start + tl.arange(0, BLOCK), vocab_size)


@triton.jit
def scan_kernel(logits, largest, firsts, maxima, vocab_size, num_pieces, num_groups, BLOCK: tl.constexpr):
    """Find the largest logit of each piece and of each group."""
    piece, index = tl.program_id(0), tl.program_id(1)
    at = piece * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + index.to(tl.int64) * vocab_size + at, mask=at < vocab_size, other=-float("inf"))
    is_nan = values != values
    values = tl.where(is_nan, -float("inf"), values)
    best, first = first_largest(values, at, vocab_size - 1)
    slot = index * num_pieces + piece
    tl.store(largest + slot, tl.where(tl.sum(is_nan.to(tl.int32), 0) > 0, float("nan"), best))
    tl.store(firsts + slot, first)
    group = piece * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    of_groups = tl.max(tl.reshape(values, (BLOCK // GROUP, GROUP)), 1)
    tl.store(maxima + index.to(tl.int64) * num_groups + group, of_groups, mask=group < num_groups)


@triton.jit(do_not_specialize=["num_rows"])
def draw_kernel(
    logits, words, largest, lows, cuts, last_cuts, sums, winners, vocab_size, num_rows, num_pieces,
    BLOCK: tl.constexpr, PIECES: tl.constexpr,
):
    """Find each piece's winner for rows that draw, among the tokens that their filters keep."""
    piece, index = tl.program_id(0), tl.program_id(1)
    temperature, top_p, min_p, top_k = parameters(words, index, num_rows, vocab_size)
    maximum, _ = maximum_of(largest + index * num_pieces, num_pieces, PIECES)
    maximum = tl.div_rn(maximum, tl.where(temperature > 0, temperature, 1.0))
    if (temperature > 0) & (tl.abs(maximum) < float("inf")):
        start, slot = piece * BLOCK, index * num_pieces + piece
        at = start + tl.arange(0, BLOCK)
        values = load_scaled(logits + index.to(tl.int64) * vocab_size, at, vocab_size, temperature)
        left = (tl.exp(values - maximum) >= min_p) & (values > -float("inf"))
        if (top_p < 1) | (top_k > 0):
            key = ordered_key(values)
            left = left & (key >= tl.load(lows + index))
            left = left & ((key != tl.load(cuts + index)) | (at <= tl.load(last_cuts + index)))
        best, winner = _race(values, left, words, index, num_rows, start, vocab_size, BLOCK)
        tl.store(sums + slot, best)
        tl.store(winners + slot, winner)


@triton.jit(do_not_specialize=["num_rows"])
def choose_kernel(
    words, largest, firsts, sums, winners, tokens, vocab_size, num_rows, num_pieces, PIECES: tl.constexpr,
):
    """Store each row's token."""
    index = tl.program_id(0)
    temperature, _, _, _ = parameters(words, index, num_rows, vocab_size)
    maximum, first = maximum_of(largest + index * num_pieces, num_pieces, PIECES)
    token = tl.load(firsts + index * num_pieces + first)
    if temperature > 0:
        maximum = tl.div_rn(maximum, temperature)
        piece = tl.arange(0, PIECES)
        values = tl.load(sums + index * num_pieces + piece, mask=piece < num_pieces, other=-float("inf"))
        _most, first = first_largest(values, piece, PIECES - 1)
        token = tl.load(winners + index * num_pieces + tl.minimum(first, num_pieces - 1))
    tl.store(tokens + index, tl.where(tl.abs(maximum) < float("inf"), token, -1))
# fmt: on


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


class Kinds(NamedTuple):
    """Which kinds of rows a batch has; it determines what sample_tokens() launches."""

    draws: bool  # some row draws
    cuts: bool  # some row draws with top_k or top_p


def kinds_of(words: Int32s) -> Kinds:
    """Return the kinds of rows for these parameters [words, S], in host memory."""
    temperature, top_p = words[:2].view(np.float32)
    draws = temperature > 0
    return Kinds(bool(draws.any()), bool((draws & ((words[3] > 0) | (top_p < 1))).any()))


def sample_tokens(logits: torch.Tensor, words: torch.Tensor, kinds: Kinds) -> torch.Tensor:
    """Return token ids [S] int32 on the device; -1 if the largest scaled logit is not finite.

    logits [S, V] float32 contiguous; words from pack_columns, on the device; kinds: kinds_of(), or more. A scaled logit
    is divided by the row's temperature.
    """
    assert logits.is_contiguous(), logits.stride()
    tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    if len(logits):
        _launch(logits, words, kinds, tokens)
    return tokens


def _launch(logits: torch.Tensor, words: torch.Tensor, kinds: Kinds, tokens: torch.Tensor) -> None:
    num_rows, vocab_size = logits.shape
    block = max(_MIN_BLOCK, min(MAX_BLOCK, power_of_2(vocab_size)))
    num_pieces, num_groups = ceil_div(vocab_size, block), ceil_div(vocab_size, GROUP.value)
    pieces, grid = power_of_2(num_pieces), (num_pieces, num_rows)

    def empty(width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((num_rows, width), dtype=dtype, device=logits.device)

    largest, firsts, maxima = (
        empty(num_pieces, torch.float32),
        empty(num_pieces, torch.int32),
        empty(num_groups, torch.float32),
    )
    sums, winners = empty(num_pieces, torch.float64), empty(num_pieces, torch.int32)
    scan_kernel[grid](
        logits, largest, firsts, maxima, vocab_size, num_pieces, num_groups, BLOCK=block, num_warps=NUM_WARPS
    )
    found = Thresholds.allocate(num_rows, logits.device)
    if kinds.cuts:
        find_thresholds(logits, words, largest, maxima, found)
    if kinds.draws:
        draw_kernel[grid](
            logits, words, largest, *found, sums, winners, vocab_size, num_rows, num_pieces,
            BLOCK=block, PIECES=pieces, num_warps=NUM_WARPS,
        )  # fmt: skip
    choose_kernel[(num_rows,)](
        words, largest, firsts, sums, winners, tokens, vocab_size, num_rows, num_pieces, PIECES=pieces
    )
