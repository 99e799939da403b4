"""TritonHeadPlace: a draft head on a device. Import it only for device=cuda, because it imports triton."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from core.models.operations.tensor import Operation, Tensor
from core.models.operations.triton_operations import TritonAttend, TritonLatentAttend, TritonOperations, TritonStep
from ipc.tables.arrays import AnyInts, Floats, Ints
from kernels.memory.kv_cache import KVCache
from kernels.torch.tensors import to_array


class TritonHeadPlace:
    """A HeadPlace with Triton's kernels. The methods are documented there."""

    def __init__(self, operations: TritonOperations, dtype: torch.dtype) -> None:
        """operations: of the head's layer. dtype: the model's."""
        self.operations, self._device, self._dtype = operations, operations.device, dtype

    def unscaled(self, embedding: Operation) -> Operation:
        """Return the embedding without the model's factor."""
        assert isinstance(embedding, partial), type(embedding)
        return partial(embedding, scale=1.0)

    def sent(self, numbers: AnyInts) -> torch.Tensor:
        """Return a copy on the device."""
        return torch.from_numpy(np.ascontiguousarray(numbers, np.int64)).to(self._device, copy=True)

    def zeros(self, *shape: int) -> torch.Tensor:
        """Return zeros."""
        return torch.zeros(shape, device=self._device)

    def joined(self, parts: Sequence[Tensor], axis: int) -> torch.Tensor:
        """Return the parts one after the other."""
        return torch.cat(tuple(parts), axis)

    def rounded(self, numbers: Tensor) -> torch.Tensor:
        """Return numbers of the model's dtype."""
        rounded: torch.Tensor = numbers.to(self._dtype)
        return rounded

    def own_floats(self, numbers: Tensor) -> torch.Tensor:
        """Return a copy in float32."""
        copied: torch.Tensor = numbers.to(torch.float32, copy=True)
        return copied

    def step(self, positions: Ints, slots: Ints, cache: KVCache, work: tuple[Any, ...] = ()) -> TritonStep:
        """Return the inputs of attention."""
        return self.operations.step(self.sent(positions), self.sent(slots), work, cache)

    def store(self, mix: Callable[[Tensor, Any, int], Tensor], x: Tensor, step: TritonStep) -> None:
        """Store K and V."""
        assert isinstance(mix, TritonAttend | TritonLatentAttend), type(mix)
        mix.store(x, step, 0)

    def allocate_swap_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Allocate a cache in the host's memory."""
        return self.operations.allocate_swap_cache(num_blocks, block_size)

    def to_host(self, numbers: Tensor) -> Floats:
        """Return a copy in host memory."""
        return to_array(numbers.float().cpu())
