"""PackedStack: the same product for all experts, whose weights stay quantized in device memory.

Before the products of a step, the weights of the experts that it chose are unpacked into memory that all layers share.
So a step has the bits of dequantized weights, and time and memory for few experts if few were chosen.
"""

from collections.abc import Sequence

import torch

from kernels.torch.packed_rows import PackedRows
from kernels.triton.packed_linear import unpack
from kernels.triton.routed.expert_products import StackedProduct


class Scratch:
    """Memory for the unpacked weights of one layer, by the name of the product. Layers use it one after the other."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def reserve(self, name: str, count: int, dtype: torch.dtype, device: torch.device) -> None:
        """Have room for `count` numbers. Called before the first step, because CUDA graphs keep its address."""
        if name not in self._memory or self._memory[name].numel() < count:
            self._memory[name] = torch.zeros(count, dtype=dtype, device=device)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Return a part of this shape."""
        return self._memory[name][: torch.Size(shape).numel()].view(shape)


class PackedStack:
    """A product of all experts."""

    def __init__(
        self, packed: PackedRows, bias: torch.Tensor | None, num_experts: int, *, dtype: torch.dtype, scratch: Scratch
    ) -> None:
        """packed: the experts' rows, one expert after the other. bias [E, out] or None. dtype: of the products."""
        self._packed, self._bias, self._scratch = packed, bias, scratch
        self._shape = num_experts, len(packed.codes) // num_experts, packed.depth
        self._name = f"{self._shape}"
        scratch.reserve(self._name, len(packed.codes) * packed.depth, dtype, packed.codes.device)

    def unpacked(self, used: torch.Tensor) -> StackedProduct:
        """Return the product with the weights of the experts whose number in used [E] int32 is not 0.

        Valid until another layer's product is unpacked.
        """
        weight = self._scratch.take(self._name, *self._shape)
        unpack(self._packed, weight.dtype, weight.view(-1, self._packed.depth), used)
        return StackedProduct(weight, self._bias)


def joins_all(parts: Sequence[PackedRows]) -> bool:
    """Return whether all parts can follow each other in one PackedRows."""
    return all(parts[0].joins(part) for part in parts)
