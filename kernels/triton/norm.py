"""TritonNorm: normalisation of the last dimension, and the addition before or after it; see kernels/torch/norm.py."""

import torch
import triton
import triton.language as tl

from kernels.triton.arithmetic.sums import sum_of
from kernels.triton.device import power_of_2


# fmt: off
@triton.jit
def norm_kernel(
    hidden, x, weight, bias, out, eps, multiplier,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, PRECEDES: tl.constexpr, REPLACES: tl.constexpr,
    SCALES: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, CENTRED: tl.constexpr,
):
    """Normalise one row in each program: x; or, if it ADDS, hidden, to which x is added, times multiplier if it SCALES.

    PRECEDES: hidden is normalised as it was before the addition. REPLACES: hidden becomes the result, in float32.
    Without a weight it is only rounded.
    """
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    values = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        if SCALES:
            values *= multiplier
        before = tl.load(hidden + row + column, mask=inside, other=0.0)
        values += before
        tl.store(hidden + row + column, values, mask=inside)
        if PRECEDES:
            values = before
    if HAS_WEIGHT:
        if CENTRED:
            values = tl.where(inside, values - tl.div_rn(sum_of(values), WIDTH * 1.0), 0.0)
        scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(sum_of(values * values), WIDTH * 1.0) + eps))
        values = values * scale * tl.load(weight + column, mask=inside, other=0.0)
        if HAS_BIAS:
            values += tl.load(bias + column, mask=inside, other=0.0)
    if REPLACES:
        tl.store(hidden + row + column, values, mask=inside)
    tl.store(out + row + column, values.to(out.dtype.element_ty), mask=inside)
# fmt: on


class TritonNorm:
    """A norm in float32, rounded once to dtype: x / sqrt(mean(x ** 2) + eps) * weight [d] float32.

    A centred one is a layer normalisation, which may have a bias [d] float32. Without a weight it only rounds.
    residual_multiplier, precedes: see core.models.operations.operations.Norm. replaces: x, or hidden, becomes the
    result before it is rounded.
    """

    def __init__(
        self,
        weight: torch.Tensor | None,
        eps: float,
        dtype: torch.dtype,
        residual_multiplier: float = 1.0,
        *,
        bias: torch.Tensor | None = None,
        is_centred: bool = False,
        precedes: bool = False,
        replaces: bool = False,
    ) -> None:
        self.weight, self.bias = (None if one is None else one.contiguous() for one in (weight, bias))
        self.eps, self.dtype, self.residual_multiplier = eps, dtype, residual_multiplier
        self._constants = {
            "PRECEDES": precedes,
            "REPLACES": replaces,
            "SCALES": residual_multiplier != 1.0,
            "HAS_WEIGHT": weight is not None,
            "HAS_BIAS": bias is not None,
            "CENTRED": is_centred,
        }

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [T, d] contiguous, any floating type -> [T, d] with dtype. One that is replaced is float32."""
        return self._run(x, x, adds=False)

    def after(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add x [T, d] times the residual multiplier to hidden [T, d] float32 in place, and return hidden normalised.

        Both are contiguous. The result [T, d] has dtype.
        """
        return self._run(hidden, x, adds=True)

    def _run(self, hidden: torch.Tensor, x: torch.Tensor, *, adds: bool) -> torch.Tensor:
        assert hidden.is_contiguous(), hidden.stride()
        assert x.is_contiguous(), x.stride()
        num_rows, width = x.shape
        out = torch.empty(x.shape, dtype=self.dtype, device=x.device)
        if num_rows:
            norm_kernel[(num_rows,)](
                hidden,
                x,
                *(out if one is None else one for one in (self.weight, self.bias)),
                out,
                self.eps,
                self.residual_multiplier,
                WIDTH=width,
                BLOCK=power_of_2(width),
                ADDS=adds,
                **self._constants,
            )
        return out
