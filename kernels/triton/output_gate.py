"""The gate of attention's output in Triton. The reference is kernels/torch/output_gate.py."""

import torch
import triton
import triton.language as tl

from kernels.triton.device import power_of_2
from kernels.triton.gated_activation import MAX_BLOCK


@triton.jit
def open_gates_kernel(mixed, gates, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK numbers of one row in each program, in place."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    gate = tl.load(gates + at, mask=inside, other=0.0).to(tl.float32)
    # exp of a number <= 0 never overflows.
    small = tl.exp(-tl.abs(gate))
    sigmoid = tl.where(gate < 0, small, 1.0) / (1.0 + small)
    result = tl.load(mixed + at, mask=inside, other=0.0).to(tl.float32) * sigmoid
    tl.store(mixed + at, result.to(mixed.dtype.element_ty), mask=inside)


def open_gates(mixed: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Multiply mixed [T, W] by the sigmoid of gates [T, W] in place, and return mixed. Both contiguous, with one dtype.

    It computes in float32 and rounds once.
    """
    assert mixed.is_contiguous(), mixed.stride()
    assert gates.is_contiguous(), gates.stride()
    num_rows, width = mixed.shape
    block = min(MAX_BLOCK, power_of_2(width))
    if num_rows:
        open_gates_kernel[(num_rows, triton.cdiv(width, block))](mixed, gates, WIDTH=width, BLOCK=block)
    return mixed
