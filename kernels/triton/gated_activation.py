"""The gated activations f(gate) * up in Triton: silu, gelu, or clamped; see kernels/torch/gated_activation.py."""

import torch
import triton
import triton.language as tl

from kernels.triton.arithmetic.elementary import error_function, exponential
from kernels.triton.device import power_of_2

MAX_BLOCK = 1024
_SQRT_8_OVER_PI = tl.constexpr(1.5957691216057308)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_LIMIT, _STEEPNESS = tl.constexpr(7.0), tl.constexpr(1.702)


@triton.jit
def gelu_tanh_of(x):
    """Return the tanh form of gelu for float32 numbers."""
    return tl.div_rn(x, 1.0 + exponential(-x * (tl.fma(x * x, 0.044715, 1.0) * _SQRT_8_OVER_PI)))


@triton.jit
def gelu_erf_of(x):
    """Return gelu for float32 numbers."""
    return x * (0.5 + 0.5 * error_function(x * _SQRT_HALF))


@triton.jit
def gated(gate, up, FUNCTION: tl.constexpr):
    """Return f(gate) * up; all float32. FUNCTION: silu, gelu, gelu_pytorch_tanh or clamped_silu."""
    if FUNCTION == "gelu_pytorch_tanh":
        opened = gelu_tanh_of(gate)
    elif FUNCTION == "gelu":
        opened = gelu_erf_of(gate)
    elif FUNCTION == "clamped_silu":
        gate = tl.where(gate > _LIMIT, _LIMIT, gate)
        opened = tl.div_rn(gate, 1.0 + exponential(gate * -_STEEPNESS))
        up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up)) + 1.0
    else:
        opened = tl.div_rn(gate, 1.0 + exponential(-gate))
    return opened * up


@triton.jit
def gated_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FUNCTION: tl.constexpr):
    """Compute BLOCK numbers of one row in each program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, gated(gate, up, FUNCTION).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up: gate_up [T, 2 * I] contiguous -> [T, I], same dtype; float32 inside, rounded once."""
    return _run(gate_up, "silu")


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute gelu(gate) * up like silu_mul, with gelu's tanh approximation."""
    return _run(gate_up, "gelu_pytorch_tanh")


def gelu_erf_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute gelu(gate) * up like silu_mul."""
    return _run(gate_up, "gelu")


def clamped_silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute gate * sigmoid(1.702 * gate) * (1 + up) like silu_mul, with gate at most 7 and up between -7 and 7."""
    return _run(gate_up, "clamped_silu")


def _run(gate_up: torch.Tensor, function: str) -> torch.Tensor:
    assert gate_up.is_contiguous(), gate_up.stride()
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    block = min(MAX_BLOCK, power_of_2(width))
    if num_rows:
        gated_kernel[(num_rows, triton.cdiv(width, block))](gate_up, out, WIDTH=width, BLOCK=block, FUNCTION=function)
    return out
