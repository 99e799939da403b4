"""The gate of attention's output (Qiu et al. 2025, arXiv 2505.06708)."""

import torch


def open_gates(mixed: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Return attention's output mixed [T, H * D] times the sigmoid of gates [T, H * D], or [T, H], one a head."""
    heads = mixed.view(*gates.shape, -1)
    return (heads * torch.sigmoid(gates)[..., None]).view(mixed.shape)
