"""CpuHeadPlace: a draft head with the C kernels."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from core.models.config import ModelConfig
from core.models.operations.cpu_latent import CpuLatentAttend
from core.models.operations.cpu_operations import CpuAttend, CpuOperations, CpuStep
from core.models.operations.tensor import Operation, Tensor
from ipc.tables.arrays import AnyInts, Floats, Ints
from kernels.cpu.embedding import CpuEmbedding
from kernels.elements import Dtype, rounded, to_floats
from kernels.memory.kv_cache import KVCache


class CpuHeadPlace:
    """A HeadPlace with the C kernels. The methods are documented there."""

    def __init__(self, config: ModelConfig, dtype: Dtype, target: CpuOperations) -> None:
        """target: the operations of the model."""
        self.operations = CpuOperations(config, dtype, target.library, target.form, shares_blocks=target.shares_blocks)
        self._dtype = dtype

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

    def step(self, positions: Ints, slots: Ints, cache: KVCache, work: tuple[Any, ...] = ()) -> CpuStep:
        """Return the inputs of attention."""
        (table,) = self.operations.tables
        assert table is not None, "a head rotates"
        table.reach(int(positions.max()) + 1)
        return CpuStep(np.ascontiguousarray(positions), np.ascontiguousarray(slots), (table,), work, cache)

    def store(self, mix: Callable[[Tensor, Any, int], Tensor], x: Tensor, step: CpuStep) -> None:
        """Store K and V."""
        assert isinstance(mix, CpuAttend | CpuLatentAttend), type(mix)
        mix.store(x, step, 0)

    def allocate_swap_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Allocate a cache like the other one."""
        return self.operations.allocate_cache(num_blocks, block_size)

    def to_host(self, numbers: Tensor) -> Floats:
        """Return the array itself."""
        floats: Floats = numbers
        return floats
