"""TorchNorm: normalisation of the last dimension, and the addition before or after it."""

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import layer_norm

from kernels.torch.rms_norm import rms_norm


@dataclass(frozen=True)
class TorchNorm:
    """Normalisation of the last dimension: RMS norm or layer normalisation."""

    weight: torch.Tensor | None  # float32, [d] or [heads, d]; None: x is only rounded
    eps: float
    dtype: torch.dtype
    residual_multiplier: float = 1.0
    bias: torch.Tensor | None = None  # [d] float32, for a centred norm
    is_centred: bool = False
    precedes: bool = False
    replaces: bool = False  # what is normalised becomes the result before it is rounded, if it is float32

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.replaces:
            return x.copy_(replace(self, replaces=False, dtype=torch.float32)(x)).to(self.dtype, copy=True)
        if self.weight is None:
            return x.to(self.dtype, copy=True)
        if self.is_centred:
            return layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self.eps).to(self.dtype)
        return rms_norm(x.float(), self.weight, self.eps, self.dtype)

    def after(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add x [T, d] times the residual multiplier to hidden [T, d] float32 in place, and return hidden normalised.

        A norm that precedes normalises hidden as it was before.
        """
        before = self(hidden) if self.precedes else None
        add(hidden, x, self.residual_multiplier)
        return self(hidden) if before is None else before


def add(hidden: torch.Tensor, x: torch.Tensor, multiplier: float) -> None:
    """Add x [T, d] times multiplier to hidden [T, d] float32, in place."""
    hidden += x if multiplier == 1.0 else x.float() * multiplier
