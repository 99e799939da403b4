"""CpuNorm: root mean square normalisation, and the addition before it, by the C kernel (kernels/cpu/norm.h)."""

import ctypes

import torch

from kernels.cpu.library import ELEMENT_TYPES, CpuLibrary
from kernels.cpu.structs import NormArguments


class CpuNorm:
    """Computes x / sqrt(mean(x ** 2) + eps) * weight. weight is [d] float32; results are rounded once to dtype."""

    def __init__(self, library: CpuLibrary, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> None:
        self.weight, self.eps, self.dtype = weight.contiguous(), eps, dtype
        self._run = library.function("norm", ctypes.POINTER(NormArguments))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x normalised, [T, d] of dtype. x is [T, d], contiguous, float32 or bfloat16."""
        assert x.is_contiguous(), x.stride()
        out = torch.empty(x.shape, dtype=self.dtype)
        self._normalise(None, x, out)
        return out

    def after(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add x [T, d] float32 or bfloat16 to hidden [T, d] float32 in place; return hidden normalised, of dtype."""
        assert x.is_contiguous(), x.stride()
        out = torch.empty(hidden.shape, dtype=self.dtype)
        self._normalise(hidden.data_ptr(), x, out)
        return out

    def _normalise(self, hidden: int | None, x: torch.Tensor, out: torch.Tensor) -> None:
        self._run(
            NormArguments(
                hidden,
                x.data_ptr(),
                self.weight.data_ptr(),
                out.data_ptr(),
                *x.shape,
                ELEMENT_TYPES[x.dtype],
                ELEMENT_TYPES[self.dtype],
                self.eps,
            )
        )
