"""The C kernels' classes on torch's tensors, for tests that compare them with torch's operations.

Each class takes tensors and dtypes of torch where its base takes arrays and element types, and returns tensors.
"""

from typing import Any

import numpy as np
import torch

from kernels.cpu import attention, embedding, gemm, kv_cache, norm, rope, sampling
from kernels.torch.tensors import element_type, to_array, to_tensor


def on_arrays(value: Any) -> Any:
    """A tensor as an array, a dtype of torch as an element type; anything else unchanged."""
    if isinstance(value, torch.Tensor):
        return to_array(value)
    return element_type(value) if isinstance(value, torch.dtype) else value


def on_tensors(value: Any) -> Any:
    """An array of numbers as a tensor; anything else unchanged."""
    return to_tensor(value) if isinstance(value, np.ndarray) else value


def converted(*arguments: Any, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    return [on_arrays(value) for value in arguments], {name: on_arrays(value) for name, value in options.items()}


class PackedMatrix(gemm.PackedMatrix):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        arguments, options = converted(*arguments, **options)
        super().__init__(*arguments, **options)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return to_tensor(super().__call__(to_array(x)))


class CpuEmbedding(embedding.CpuEmbedding):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*converted(*arguments)[0])

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return to_tensor(super().__call__(to_array(ids)))


class CpuNorm(norm.CpuNorm):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*converted(*arguments)[0])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return to_tensor(super().__call__(to_array(x)))

    def after(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return to_tensor(super().after(to_array(hidden), to_array(x)))


class CpuRope(rope.CpuRope):
    def __init__(self, *arguments: Any, **settings: bool) -> None:
        super().__init__(*converted(*arguments)[0], **settings)

    def __call__(self, *arguments: Any) -> torch.Tensor:
        return to_tensor(super().__call__(*converted(*arguments)[0]))


class CpuKVCache(kv_cache.CpuKVCache):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        arguments, options = converted(*arguments, **options)
        super().__init__(*arguments, **options)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The layers."""
        return [to_tensor(layer) for layer in self.layers]

    def keys(self, layer: int) -> torch.Tensor:
        return to_tensor(super().keys(layer))

    def values(self, layer: int) -> torch.Tensor:
        return to_tensor(super().values(layer))

    def slot_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """What write() takes, as kernels.torch.kv_cache calls it."""
        return slots

    def write(self, layer: int, slots: torch.Tensor, kv: torch.Tensor) -> None:
        super().write(layer, to_array(slots), to_array(kv))


class CpuAttention(attention.CpuAttention):
    def __call__(self, q: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return to_tensor(super().__call__(to_array(q), *arguments))


class CpuSampler(sampling.CpuSampler):
    def __call__(self, logits: torch.Tensor, *arguments: Any) -> Any:
        return super().__call__(to_array(logits), *arguments)

    def largest(self, logits: torch.Tensor) -> Any:
        return super().largest(to_array(logits))
