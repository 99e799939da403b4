"""The activations of MLPs without a gate: f(x), in float32 inside, rounded once."""

import torch
from torch.nn.functional import gelu


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Return the tanh form of gelu (Hendrycks & Gimpel 2016, arXiv 1606.08415) for x [T, I], with x's dtype."""
    return gelu(x.float(), approximate="tanh").to(x.dtype)


def gelu_erf(x: torch.Tensor) -> torch.Tensor:
    """Return gelu for x [T, I], with x's dtype."""
    return gelu(x.float()).to(x.dtype)


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """Return max(x, 0) ** 2 (So et al. 2021, arXiv 2109.08668) for x [T, I], with x's dtype."""
    return x.float().relu_().square_().to(x.dtype)


def xielu(x: torch.Tensor, numbers: list[float]) -> torch.Tensor:
    """Return xIELU for x [T, I], with x's dtype. kernels/cpu/c/layers/gate.h defines it and its four numbers."""
    positive, negative, beta, limit = numbers
    wide = x.float()
    below = (torch.expm1(wide.clamp(max=limit)) - wide) * negative
    return (torch.where(wide > 0, wide * wide * positive, below) + wide * beta).to(x.dtype)
