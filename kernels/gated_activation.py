"""The gated activations of MLPs: f(gate) * up (Shazeer 2020, arXiv 2002.05202), f = silu or the tanh form of gelu."""

from collections.abc import Callable

import torch

from kernels.rounding import round_up
from kernels.whole_vectors import LANES, in_whole_vectors

#: What the two rest on.
SILU_ = torch._C._nn.silu_
SIGMOID_ = torch.sigmoid_

#: Numbers worked on at once, so that float32 intermediates stay in a core's cache and need no fresh memory.
_BLOCK = 1 << 18

_SQRT_8_OVER_PI = 1.5957691216057308


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 * I] -> [T, I], the same dtype; float32 inside, rounded once."""
    return _gated(gate_up, lambda gate: in_whole_vectors(SILU_, gate))


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As silu_mul, with gelu's tanh approximation (Hendrycks & Gimpel 2016, arXiv 1606.08415)."""
    return _gated(gate_up, _gelu_tanh_)


def _gelu_tanh_(gate: torch.Tensor) -> torch.Tensor:
    """x * (1 + tanh(u)) / 2 = x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 * x**3): torch's own gelu divides its
    work among threads in another way, and sigmoid keeps the small results of large negative numbers."""
    twice_u = gate.square().mul_(0.044715).add_(1.0).mul_(gate).mul_(_SQRT_8_OVER_PI)
    return gate.mul_(in_whole_vectors(SIGMOID_, twice_u))


def _gated(gate_up: torch.Tensor, activation_: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    rows = max(1, _BLOCK // width)
    out = gate_up.new_empty(num_rows, width)
    for first in range(0, num_rows, rows):
        gate, up = gate_up[first : first + rows].chunk(2, -1)
        padded = torch.zeros(len(gate), round_up(width, LANES))
        inner = padded[:, :width]
        inner.copy_(gate)
        activation_(padded)
        torch.mul(inner, up, out=inner)
        out[first : first + rows] = inner
    return out
