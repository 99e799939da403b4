"""Caps of logits: cap * tanh(logits / cap)."""

import torch
import triton
import triton.language as tl

from kernels.triton.arithmetic.elementary import hyperbolic_tangent

#: Version of the arithmetic; part of the fingerprint of models with a cap.
ARITHMETIC = 1
_BLOCK = 1024


@triton.jit(do_not_specialize=["size"])
def cap_kernel(logits, cap, size, BLOCK: tl.constexpr):
    """Cap BLOCK numbers in each program."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    numbers = tl.load(logits + at, mask=inside, other=0.0)
    tl.store(logits + at, hyperbolic_tangent(tl.div_rn(numbers, cap)) * cap, mask=inside)


def capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Return cap * tanh(logits / cap) for float32 logits of any shape, contiguous, in place. NaN stays NaN."""
    assert logits.is_contiguous(), logits.stride()
    if size := logits.numel():
        cap_kernel[(triton.cdiv(size, _BLOCK),)](logits, cap, size, BLOCK=_BLOCK)
    return logits
