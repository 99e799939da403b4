"""Fp8Linear: a linear layer whose weights and activations are floats of 8 bits; see fp8_product.py."""

import torch

from kernels.dequantize import BLOCK_SIZES
from kernels.torch.packed_rows import PackedRows
from kernels.triton.fp8.fp8_product import ARITHMETIC, BLOCK, Fp8Rows, fp8_product
from kernels.triton.linear import DeviceLinear
from kernels.triton.packed_linear import PackedLinear

_PACKED_BLOCK = BLOCK_SIZES["FP8"][0]  # weights with one scale in PackedRows


class Fp8Linear:
    """The layer y = x @ weight.T + bias, with x quantized. bias [out] of any type; out_dtype: the result's."""

    def __init__(
        self,
        weight: Fp8Rows,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        *,
        input_scale: float | None = None,
    ) -> None:
        """dtype: x's. input_scale: of x; None = each 128 neighbours have their own."""
        self.weight, self.dtype, self.out_dtype, self.input_scale = weight, dtype, out_dtype, input_scale
        self.bias = None if bias is None else bias.to(out_dtype)
        self.variant = f"triton-fp8.{ARITHMETIC}-block.{BLOCK}{'' if input_scale is None else '-given'}"

    def in_own_dtype(self) -> "Fp8Linear":
        """Return the same layer with results of x's dtype."""
        return Fp8Linear(self.weight, self.bias, self.dtype, self.dtype, input_scale=self.input_scale)

    def with_whole_inputs(self) -> DeviceLinear | PackedLinear:
        """Return the layer with the same weights for x that is not quantized."""
        codes, scales, depth = self.weight
        if depth % _PACKED_BLOCK:
            return DeviceLinear(self.weight.numbers.to(self.dtype), self.bias, self.out_dtype)
        twice = scales.T.repeat_interleave(BLOCK // _PACKED_BLOCK, 1)[:, : depth // _PACKED_BLOCK].contiguous()
        rows = PackedRows(codes[:, :depth].contiguous(), twice, None, None, None, depth, None, _PACKED_BLOCK)
        return PackedLinear([rows], self.bias, self.dtype, self.out_dtype, name="fp8")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x [T, in] -> [T, out] with out_dtype."""
        out = torch.empty(len(x), len(self.weight.codes), dtype=self.out_dtype, device=x.device)
        return fp8_product(x.contiguous(), self.weight, self.bias, out, scale=self.input_scale)
