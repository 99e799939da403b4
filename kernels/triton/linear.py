"""DeviceLinear and DeviceRouter: linear layers with torch's own product on the device, at numerics level L0.

How the product sums over K depends on the number of rows.
"""

import torch
from torch.nn.functional import linear

# Sums are float32, even if a sum over K is split. float32 operands are not truncated to TF32, even if the environment
# requests it (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, set in NVIDIA's containers).
torch.set_float32_matmul_precision("highest")
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


class DeviceLinear:
    """The layer y = x @ weight.T + bias.

    weight [out, in], kept unchanged; bias [out] of any type; out_dtype: the result's dtype; None = the weight's.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> None:
        self.weight, self.out_dtype = weight.contiguous(), out_dtype or weight.dtype
        self.bias = None if bias is None else bias.to(weight.dtype)

    @property
    def variant(self) -> str:
        """Return the name of the product, for reports."""
        return f"torch-{self.weight.device.type}"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x [T, in] -> [T, out] with out_dtype."""
        return linear(x, self.weight, self.bias).to(self.out_dtype)


class DeviceRouter:
    """The product of a routed MLP's router, y = x @ weight.T + bias: float32, not rounded to the weight's dtype.

    weight [out, in]; bias [out] float32.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias = weight.contiguous(), bias

    @property
    def variant(self) -> str:
        """Return the name of the product, for reports."""
        return f"torch-{self._weight.device.type}"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x [T, in] -> [T, out] float32."""
        if x.is_cuda and x.dtype != torch.float32:
            y = torch.mm(x, self._weight.T, out_dtype=torch.float32)
        else:  # torch has that product only on CUDA
            y = linear(x.float(), self._weight.float())
        return y if self._bias is None else y.add_(self._bias)
