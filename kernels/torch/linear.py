"""TorchLinear: a linear layer with torch's products, at numerics level L0.

How torch sums over K depends on the number of rows and on the CPU model. kernels/cpu/gemm.py has the products of level
L2.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import linear

#: A function from a tensor to a tensor; models are built from these.
Operation = Callable[[torch.Tensor], torch.Tensor]


class TorchLinear:
    """The layer y = x @ weight.T + bias; weight [out, in] float32 or bfloat16, bias [out] float32.

    The product is rounded to the weight's dtype before and after the bias is added. out_dtype: the result's dtype; None
    = the weight's.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> None:
        self.variant, self._product = best_product(weight)
        self._bias, self._out_dtype = bias, out_dtype or weight.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x [T, in] -> [T, out] with out_dtype."""
        y = self._product(x)
        return (y if self._bias is None else y.add_(self._bias)).to(self._out_dtype)


def prepacked_product(weight: torch.Tensor) -> Operation:
    """Return the product with a weight [out, in] in oneDNN's own blocked layout.

    For few rows it is two to three times as fast as F.linear. Errors: RuntimeError or AttributeError if this build or
    CPU has none for the dtype.
    """
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    product = torch.ops.mkldnn._linear_pointwise.default
    product(weight.new_zeros(1, weight.shape[1]), packed, None, "none", [], "")
    return lambda x: product(x, packed, None, "none", [], "")


def plain_product(weight: torch.Tensor) -> Operation:
    """Return F.linear with a copy of a weight [out, in], which may be in a mapped file."""
    weight = weight.clone(memory_format=torch.contiguous_format)
    return lambda x: linear(x, weight)


def best_product(weight: torch.Tensor) -> tuple[str, Operation]:
    """Return the faster product that this build of torch has, and its name."""
    try:
        return "torch-prepacked", prepacked_product(weight)
    except (RuntimeError, AttributeError):
        return "torch", plain_product(weight)
