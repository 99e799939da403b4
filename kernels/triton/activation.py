"""The activations of MLPs without a gate in Triton; see kernels/torch/activation.py."""

import torch
import triton
import triton.language as tl

from kernels.triton.arithmetic.elementary import exponential
from kernels.triton.device import power_of_2
from kernels.triton.gated_activation import MAX_BLOCK, gelu_erf_of, gelu_tanh_of

_GELU_TANH, _GELU_ERF, _RELU_SQUARED, _XIELU = (tl.constexpr(number) for number in range(4))


@triton.jit
def _exponential_rest(x):
    """Return exp(x) - 1 - x for x <= 0: the series near 0, where the difference would lose its digits."""
    near = tl.maximum(x, -0.5)  # nothing that is not chosen overflows
    sums = tl.fma(near, 1.0 / 3628800.0, 1.0 / 362880.0)
    sums = tl.fma(sums, near, 1.0 / 40320.0)
    sums = tl.fma(sums, near, 1.0 / 5040.0)
    sums = tl.fma(sums, near, 1.0 / 720.0)
    sums = tl.fma(sums, near, 1.0 / 120.0)
    sums = tl.fma(sums, near, 1.0 / 24.0)
    sums = tl.fma(sums, near, 1.0 / 6.0)
    sums = tl.fma(sums, near, 0.5)
    return tl.where(x > -0.5, sums * near * near, exponential(x) - 1.0 - x)


@triton.jit
def activate_kernel(x, out, constants, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FUNCTION: tl.constexpr):
    """Compute BLOCK numbers of one row in each program. constants: the four numbers of xIELU."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    number = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if FUNCTION == _RELU_SQUARED:
        positive = tl.maximum(number, 0.0, propagate_nan=tl.PropagateNan.ALL)
        result = positive * positive
    elif FUNCTION == _XIELU:  # see kernels/cpu/c/layers/gate.h
        limit = tl.load(constants + 3)
        least = tl.where(number > limit, limit, number)  # NaN stays NaN
        below = (_exponential_rest(least) + (least - number)) * tl.load(constants + 1)
        above = number * number * tl.load(constants)
        result = tl.where(number > 0.0, above, below) + number * tl.load(constants + 2)
    elif FUNCTION == _GELU_ERF:
        result = gelu_erf_of(number)
    else:
        result = gelu_tanh_of(number)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Return the tanh form of gelu for x [T, I] contiguous, with x's dtype; float32 inside, rounded once."""
    return _run(x, _GELU_TANH)


def gelu_erf(x: torch.Tensor) -> torch.Tensor:
    """Return gelu for x, like gelu_tanh."""
    return _run(x, _GELU_ERF)


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """Return max(x, 0) ** 2 for x, like gelu_tanh."""
    return _run(x, _RELU_SQUARED)


def xielu(x: torch.Tensor, constants: torch.Tensor) -> torch.Tensor:
    """Return xIELU (arXiv 2411.13010) for x, like gelu_tanh. constants [4] float32: see kernels/cpu/c/layers/gate.h."""
    return _run(x, _XIELU, constants)


def _run(x: torch.Tensor, function: tl.constexpr, constants: torch.Tensor | None = None) -> torch.Tensor:
    assert x.is_contiguous(), x.stride()
    out, (num_rows, width) = torch.empty_like(x), x.shape
    block = min(MAX_BLOCK, power_of_2(width))
    if num_rows:
        activate_kernel[(num_rows, triton.cdiv(width, block))](
            x, out, x if constants is None else constants, WIDTH=width, BLOCK=block, FUNCTION=function.value
        )
    return out
