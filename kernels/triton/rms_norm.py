"""TritonNorm: root mean square normalisation, and the addition before it; kernels/torch/rms_norm.py is its
reference."""

import torch
import triton
import triton.language as tl

from kernels.triton.device import power_of_2


@triton.jit
def _norm(hidden, x, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr):
    """One row a program. ADDS: hidden += x, and hidden is what is normalised; else x."""
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
    """x / sqrt(mean(x ** 2) + eps) * weight [d] float32, rounded once to dtype; float32 inside."""

    def __init__(self, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> None:
        self.weight, self.eps, self.dtype = weight.contiguous(), eps, dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, d] contiguous, any floating type -> [T, d] of dtype."""
        return self._run(x, x, adds=False)

    def after(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """hidden [T, d] float32 += x [T, d], both contiguous; then hidden normalised -> [T, d] of dtype."""
        return self._run(hidden, x, adds=True)

    def _run(self, hidden: torch.Tensor, x: torch.Tensor, *, adds: bool) -> torch.Tensor:
        assert hidden.is_contiguous(), hidden.stride()
        assert x.is_contiguous(), x.stride()
        num_rows, width = x.shape
        out = torch.empty(x.shape, dtype=self.dtype, device=x.device)
        if num_rows:
            _norm[(num_rows,)](hidden, x, self.weight, out, self.eps, WIDTH=width, BLOCK=power_of_2(width), ADDS=adds)
        return out
