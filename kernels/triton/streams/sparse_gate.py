"""Gates of an MLP of which the largest count, in Triton: gelu(max(gate - cut, 0)) * up (Gemma 3n)."""

import torch
import triton
import triton.language as tl

from kernels.triton.arithmetic.sums import sum_of
from kernels.triton.device import power_of_2
from kernels.triton.gated_activation import gelu_tanh_of

#: Rows of up to 16,384 numbers are in one program's registers.
NUM_WARPS = 16


@triton.jit
def sparse_gate_kernel(gate, up, out, num_deviations, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Compute one row in each program."""
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    gates = tl.load(gate + at, mask=inside, other=0.0)
    mean = tl.div_rn(sum_of(gates), WIDTH * 1.0)
    apart = tl.where(inside, gates - mean, 0.0)
    cut = mean + tl.sqrt_rn(tl.div_rn(sum_of(apart * apart), WIDTH * 1.0)) * num_deviations
    left = tl.maximum(gates - cut, 0.0, propagate_nan=tl.PropagateNan.ALL)
    result = gelu_tanh_of(left) * tl.load(up + at, mask=inside, other=0.0)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


def sparse_gated(gate: torch.Tensor, up: torch.Tensor, num_deviations: float, dtype: torch.dtype) -> torch.Tensor:
    """Return gelu(max(gate - cut, 0)) * up for gate and up [T, I] float32 contiguous, rounded once to dtype.

    cut: the mean of a row's gates and so many of their standard deviations. gelu is its tanh form.
    """
    (num_rows, width), out = gate.shape, torch.empty(gate.shape, dtype=dtype, device=gate.device)
    if num_rows:
        sparse_gate_kernel[(num_rows,)](
            gate, up, out, num_deviations, WIDTH=width, BLOCK=power_of_2(width), num_warps=NUM_WARPS
        )
    return out
