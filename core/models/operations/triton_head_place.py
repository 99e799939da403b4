"""TritonHeadPlace: a draft head on a device. Import it only for device=cuda, because it imports triton."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from core.models.operations.cpu_head_place import Allocate
from core.models.operations.operations import ExchangingEmbedding
from core.models.operations.tensor import Operation, Tensor
from ipc.tables.arrays import AnyInts, Floats
from kernels.torch.tensors import to_array


class TritonHeadPlace:
    """A HeadPlace with Triton's kernels. The methods are documented there."""

    def __init__(self, dtype: torch.dtype, device: torch.device, allocate: Allocate) -> None:
        """dtype: the model's. allocate: a cache in the host's memory."""
        self._dtype, self._device, self.allocate_swap_cache = dtype, device, allocate

    def unscaled(self, embedding: Operation) -> Operation:
        """Return the embedding without the model's factor."""
        if isinstance(embedding, ExchangingEmbedding):
            return embedding.around(self.unscaled)
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

    def to_host(self, numbers: Tensor) -> Floats:
        """Return a copy in host memory."""
        return to_array(numbers.float().cpu())
