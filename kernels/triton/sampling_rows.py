"""What the sampler's kernels read for a row: its parameters, its logits, its largest logit."""

import triton
import triton.language as tl


@triton.jit
def parameters(words, index, num_rows, vocab_size):
    """Return temperature, top_p, min_p, top_k of a row. top_k is 0 if it keeps all tokens."""
    temperature = tl.load(words + index).to(tl.float32, bitcast=True)
    top_p = tl.load(words + num_rows + index).to(tl.float32, bitcast=True)
    min_p = tl.load(words + 2 * num_rows + index).to(tl.float32, bitcast=True)
    top_k = tl.load(words + 3 * num_rows + index)
    return temperature, top_p, min_p, tl.where(top_k < vocab_size, top_k, 0)


@triton.jit
def ordered_key(x):
    """Map float32 to int64 from 0 to 2**32 - 1 in numerical order; -0 and 0 have the same key."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def number_of(key):
    """Return the float32 with this ordered_key()."""
    bits = (key - 2147483648).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def load_scaled(row, at, vocab_size, temperature):
    """Load logits divided by the temperature, -inf past the end."""
    values = tl.load(row + at, mask=at < vocab_size, other=-float("inf"))
    return tl.where(values == -float("inf"), values, tl.div_rn(values, temperature))


@triton.jit
def first_largest(values, at, end):
    """Return the largest of values, none of them NaN, and the smallest of `at` where it occurs, at most end."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, at, end), 0).to(tl.int32)


@triton.jit
def maximum_of(largest, num_pieces, PIECES: tl.constexpr):
    """Return the largest logit of a row, NaN if there is one, and the first piece that has it."""
    piece = tl.arange(0, PIECES)
    values = tl.load(largest + piece, mask=piece < num_pieces, other=-float("inf"))
    is_nan = values != values
    best, first = first_largest(tl.where(is_nan, -float("inf"), values), piece, PIECES - 1)
    return tl.where(tl.sum(is_nan.to(tl.int32), 0) > 0, float("nan"), best), first
