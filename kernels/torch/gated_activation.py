"""The gated activations of MLPs (Shazeer 2020, arXiv 2002.05202): f(gate) * up with silu, gelu, or clamps."""

import torch
from torch.nn.functional import gelu, silu

_SQRT_8_OVER_PI = 1.5957691216057308
_LIMIT, _STEEPNESS = 7.0, 1.702


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up: gate_up [T, 2 * I] -> [T, I], the same dtype; float32 inside, rounded once."""
    gate, up = gate_up.chunk(2, -1)
    return silu(gate.float()).mul_(up).to(gate_up.dtype)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute gelu(gate) * up like silu_mul.

    gelu is the tanh approximation (Hendrycks & Gimpel 2016, arXiv 1606.08415).
    """
    gate, up = (half.float() for half in gate_up.chunk(2, -1))
    # x * (1 + tanh(u)) / 2 = x * sigmoid(2 u): the small results of large negative numbers keep their digits.
    twice_u = gate.square().mul_(0.044715).add_(1.0).mul_(gate).mul_(_SQRT_8_OVER_PI)
    return twice_u.sigmoid_().mul_(gate).mul_(up).to(gate_up.dtype)


def gelu_erf_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute gelu(gate) * up like silu_mul."""
    gate, up = (half.float() for half in gate_up.chunk(2, -1))
    return gelu(gate).mul_(up).to(gate_up.dtype)


def clamped_silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute gate * sigmoid(1.702 * gate) * (1 + up) like silu_mul, with gate at most 7 and up between -7 and 7."""
    gate, up = (half.float() for half in gate_up.chunk(2, -1))
    gate = gate.clamp(max=_LIMIT)
    return (gate * _STEEPNESS).sigmoid_().mul_(gate).mul_(up.clamp(-_LIMIT, _LIMIT) + 1.0).to(gate_up.dtype)
