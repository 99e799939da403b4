"""DeviceLinear: a linear layer on the device, with the ordered product (numerics level L2) or torch's own (L0).

How torch's product sums over K depends on the number of rows.
"""

from typing import Protocol

import torch
from torch.nn.functional import linear

from kernels.triton.ordered_product import gated_product, ordered_product

# Sums are float32, even if a sum over K is split. float32 operands are not truncated to TF32, even if the environment
# requests it (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, set in NVIDIA's containers).
torch.set_float32_matmul_precision("highest")
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


class DeviceProduct(Protocol):
    """ordered_product() or torch_product()."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        """Write x [T, in] @ weight.T [in, out] plus bias into out [T, out], and return it."""


def torch_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """Write x @ weight.T plus bias into out, like ordered_product(), with torch's product."""
    if out.dtype == weight.dtype:
        if bias is None:
            return torch.mm(x, weight.T, out=out)
        return torch.addmm(bias.to(weight.dtype), x, weight.T, out=out)
    if x.is_cuda:
        torch.mm(x, weight.T, out_dtype=out.dtype, out=out)
    else:  # torch has that product only on CUDA
        out.copy_(linear(x.float(), weight.float()))
    return out if bias is None else out.add_(bias)


class DeviceLinear:
    """The layer y = x @ weight.T + bias.

    weight [out, in], kept unchanged; bias [out] of any type; out_dtype: the result's dtype; None = the weight's.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        product: DeviceProduct = ordered_product,
    ) -> None:
        self.weight, self.out_dtype, self.product = weight.contiguous(), out_dtype or weight.dtype, product
        self.bias = None if bias is None else bias.to(self.out_dtype)

    def in_own_dtype(self) -> "DeviceLinear":
        """Return the same layer with results of the weight's dtype."""
        return DeviceLinear(self.weight, self.bias, product=self.product)

    @property
    def variant(self) -> str:
        """Return the name of the product, for reports."""
        name = "torch" if self.product is torch_product else "ordered"
        return f"{name}-{self.weight.device.type}"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x [T, in] -> [T, out] with out_dtype."""
        out = torch.empty(len(x), len(self.weight), dtype=self.out_dtype, device=x.device)
        return self.product(x.contiguous(), self.weight, self.bias, out)


class GatedLinear(DeviceLinear):
    """The layer f(gate) * up with (gate, up) = x @ weight.T + bias, in one kernel. Its product is the ordered one.

    weight [2 * width, in] and bias [2 * width]: gate's, then up's. function: see kernels/triton/gated_activation.py.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, function: str) -> None:
        super().__init__(weight, bias)
        self.function = function

    def gate_and_up(self, x: torch.Tensor) -> torch.Tensor:
        """Return gate and up [T, 2 * width] of x [T, in], before the activation."""
        return super().__call__(x)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x [T, in] -> [T, width], with the bits of gate_and_up() and then the activation."""
        return gated_product(x.contiguous(), self.weight, self.bias, self.function)
