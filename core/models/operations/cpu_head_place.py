"""CpuHeadPlace: a draft head with the C kernels."""

import copy
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from core.models.operations.tensor import Operation, Tensor
from ipc.tables.arrays import AnyInts, Floats, Ints
from kernels.cpu.embedding import CpuEmbedding
from kernels.elements import Dtype, rounded, to_floats
from kernels.memory.kv_cache import KVCache

#: Allocates a cache of some blocks of a size. Errors: MemoryError.
Allocate: TypeAlias = Callable[[int, int], KVCache]


class CpuHeadPlace:
    """A HeadPlace with the C kernels. The methods are documented there."""

    def __init__(self, dtype: Dtype, allocate: Allocate) -> None:
        """dtype: the model's. allocate: a cache for blocks that are swapped out."""
        self._dtype, self.allocate_swap_cache = dtype, allocate

    def unscaled(self, embedding: Operation) -> Operation:
        """Return the embedding without the model's factor."""
        assert isinstance(embedding, CpuEmbedding), type(embedding)
        own = copy.copy(embedding)
        own.scale = 1.0
        return own

    def sent(self, numbers: AnyInts) -> Ints:
        """Return the array itself if it is contiguous int64."""
        return np.ascontiguousarray(numbers, np.int64)

    def zeros(self, *shape: int) -> Floats:
        """Return zeros."""
        return np.zeros(shape, np.float32)

    def joined(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        """Return the parts one after the other."""
        return np.concatenate(parts, axis) if len(parts) > 1 else np.ascontiguousarray(parts[0])

    def rounded(self, numbers: Tensor) -> Tensor:
        """Return numbers of the model's dtype."""
        return rounded(numbers, self._dtype)

    def own_floats(self, numbers: Tensor) -> Tensor:
        """Return a copy in float32."""
        return np.array(to_floats(numbers), np.float32)

    def to_host(self, numbers: Tensor) -> Floats:
        """Return the array itself."""
        floats: Floats = numbers
        return floats
