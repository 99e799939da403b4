"""The gate of attention's output in Triton. The reference is kernels/torch/output_gate.py."""

import torch
import triton
import triton.language as tl

from kernels.triton.arithmetic.elementary import exponential
from kernels.triton.device import power_of_2
from kernels.triton.gated_activation import MAX_BLOCK


@triton.jit
def open_gates_kernel(mixed, gates, WIDTH: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK numbers of one row in each program, in place. A gate is for EACH numbers."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    which = tl.program_id(0).to(tl.int64) * (WIDTH // EACH) + column // EACH
    gate = tl.load(gates + which, mask=inside, other=0.0).to(tl.float32)
    result = tl.div_rn(tl.load(mixed + at, mask=inside, other=0.0).to(tl.float32), 1.0 + exponential(-gate))
    tl.store(mixed + at, result.to(mixed.dtype.element_ty), mask=inside)


def open_gates(mixed: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Multiply mixed [T, W] by the sigmoid of gates in place, and return mixed. Both contiguous, with one dtype.

    gates [T, W], or [T, H], one for each of H heads. It computes in float32 and rounds once.
    """
    assert mixed.is_contiguous(), mixed.stride()
    assert gates.is_contiguous(), gates.stride()
    num_rows, width = mixed.shape
    block = min(MAX_BLOCK, power_of_2(width))
    if num_rows:
        grid = num_rows, triton.cdiv(width, block)
        open_gates_kernel[grid](mixed, gates, WIDTH=width, EACH=width // gates.shape[1], BLOCK=block)
    return mixed
