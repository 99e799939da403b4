"""log_softmax in Triton: log probabilities of whole rows. A row's order of summation depends on its length alone."""

import torch
import triton
import triton.language as tl

from kernels.triton.arithmetic.elementary import exp2_negative, ln
from kernels.triton.arithmetic.sums import sum_of

BLOCK = 1024
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def log_softmax_kernel(logits, divisors, out, vocab_size, BLOCK: tl.constexpr):
    """Compute one row in each program."""
    row = tl.program_id(0).to(tl.int64) * vocab_size
    divisor = tl.load(divisors + tl.program_id(0))
    at = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), -float("inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        values = tl.load(logits + row + start + at, mask=start + at < vocab_size, other=-float("inf"))
        largest = tl.maximum(largest, tl.div_rn(values, divisor), propagate_nan=tl.PropagateNan.ALL)
    maximum = tl.max(largest, 0)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        values = tl.load(logits + row + start + at, mask=start + at < vocab_size, other=-float("inf"))
        sums += exp2_negative((tl.div_rn(values, divisor) - maximum) * _LOG2_E)
    total = ln(sum_of(sums).to(tl.float64)).to(tl.float32)
    for start in range(0, vocab_size, BLOCK):
        values = tl.load(logits + row + start + at, mask=start + at < vocab_size, other=0.0)
        tl.store(out + row + start + at, tl.div_rn(values, divisor) - maximum - total, mask=start + at < vocab_size)


def log_softmax(logits: torch.Tensor, divisors: torch.Tensor) -> torch.Tensor:
    """Return the log probabilities [S, V] of logits [S, V] float32, each row divided by its divisor [S] float32."""
    assert logits.is_contiguous(), logits.stride()
    out = torch.empty_like(logits)
    if len(logits):
        log_softmax_kernel[(len(logits),)](logits, divisors, out, logits.shape[1], BLOCK=BLOCK)
    return out
