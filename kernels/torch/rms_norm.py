"""Root mean square normalisation (Zhang & Sennrich 2019, arXiv 1910.07467)."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """Compute x / sqrt(mean(x**2) + eps) * weight, rounded once to dtype.

    x [..., d] float32; weight float32, [d] or more of x's last dimensions; the result has x's shape. A row is summed by
    one thread in a fixed order (below 32,768 columns), so it does not depend on the other rows.
    """
    scale = torch.rsqrt_(x.square().mean(-1, keepdim=True).add_(eps))
    return (x * scale).mul_(weight).to(dtype)
