"""TorchAdapter: a low-rank adapter (LoRA) as torch tensors, at numerics level L0."""

from collections.abc import Sequence

import torch

from kernels.low_rank import LowRank, ProductShape
from kernels.torch.tensors import to_tensor


class TorchAdapter:
    """The matrices of one adapter for all products of a model, in the order of `shapes`, with a model's dtype.

    products: for each product, the parts that the adapter changes; None = not this one.
    """

    def __init__(
        self, shapes: Sequence[ProductShape], products: Sequence[Sequence[LowRank | None]], dtype: torch.dtype
    ) -> None:
        #: For each product: the columns of each adapted part, a, b and the scale.
        self._products: list[list[tuple[slice, torch.Tensor, torch.Tensor, float]]] = []
        self.num_bytes = 0
        for shape, parts in zip(shapes, products, strict=True):
            entries, begin = [], 0
            for size, part in zip(shape.parts, parts, strict=True):
                if part is not None:
                    a, b = (to_tensor(numbers).to(dtype) for numbers in (part.a, part.b))
                    entries.append((slice(begin, begin + size), a, b, part.scale))
                    self.num_bytes += (a.numel() + b.numel()) * a.element_size()
                begin += size
            self._products.append(entries)

    def add(self, x: torch.Tensor, y: torch.Tensor, tokens: torch.Tensor, number: int) -> None:
        """Add what this adapter adds to a product of x [T, in] to rows `tokens` [n] of y [T, out], in place."""
        mine = x.index_select(0, tokens)
        for columns, a, b, scale in self._products[number]:
            y[tokens, columns] += ((mine @ a.T) @ b.T * scale).to(y.dtype)
