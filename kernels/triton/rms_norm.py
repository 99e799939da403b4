"""TritonNorm: root mean square normalisation, and the addition before it. Its reference: kernels/torch/rms_norm.py."""

import torch
import triton
import triton.language as tl

from kernels.triton.device import power_of_2


@triton.jit
def _norm(hidden, x, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr):
    """Normalise one row in each program. ADDS: hidden += x, and the result is hidden normalised; else x normalised."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    values = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(hidden + row + column, mask=inside, other=0.0)
        tl.store(hidden + row + column, values, mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / WIDTH + eps)
    result = values * scale * tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + row + column, result.to(out.dtype.element_ty), mask=inside)


class TritonNorm:
    """The norm x / sqrt(mean(x ** 2) + eps) * weight [d] float32, rounded once to dtype; float32 inside."""

    def __init__(self, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> None:
        self.weight, self.eps, self.dtype = weight.contiguous(), eps, dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [T, d] contiguous, any floating type -> [T, d] of dtype."""
        return self._run(x, x, adds=False)

    def after(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add x [T, d] to hidden [T, d] float32 in place; return hidden normalised, [T, d] of dtype. Both are
        contiguous.
        """
        return self._run(hidden, x, adds=True)

    def _run(self, hidden: torch.Tensor, x: torch.Tensor, *, adds: bool) -> torch.Tensor:
        assert hidden.is_contiguous(), hidden.stride()
        assert x.is_contiguous(), x.stride()
        num_rows, width = x.shape
        out = torch.empty(x.shape, dtype=self.dtype, device=x.device)
        if num_rows:
            _norm[(num_rows,)](hidden, x, self.weight, out, self.eps, WIDTH=width, BLOCK=power_of_2(width), ADDS=adds)
        return out
