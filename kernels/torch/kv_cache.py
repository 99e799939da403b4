"""TorchKVCache: a KVCache whose layers are torch tensors, with the operations that torch's attention needs."""

from collections.abc import Sequence

import torch

from kernels.memory.kv_cache import KVCache
from kernels.torch.tensors import to_tensor


class TorchKVCache(KVCache):
    """The blocks of all layers as tensors. Errors: MemoryError with the sizes if it cannot be reserved."""

    layers: Sequence[torch.Tensor]

    def _allocate(self, num_layers: int, shape: tuple[int, ...]) -> Sequence[torch.Tensor]:
        return [to_tensor(layer) for layer in super()._allocate(num_layers, shape)]

    def keys(self, layer: int) -> torch.Tensor:
        """Return the logical view [num_blocks, block_size, num_kv_heads, head_dim] of a layer's keys."""
        return self.layers[layer][:, 0].transpose(1, 2)

    def values(self, layer: int) -> torch.Tensor:
        """Return the logical view [num_blocks, block_size, num_kv_heads, head_dim] of a layer's values."""
        return self.layers[layer][:, 1].transpose(1, 2)

    def slot_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the rows of a layer to which tokens are written, [T * 2 * Hkv], ordered by (token, K or V, head).

        A row has head_dim numbers. slots [T] int64: block * block_size + offset, each >= block_size. The rows are the
        same for every layer.
        """
        block, offset = slots // self.block_size, slots % self.block_size
        heads = torch.arange(2 * self.num_kv_heads)
        return ((block[:, None] * (2 * self.num_kv_heads) + heads) * self.block_size + offset[:, None]).flatten()

    def write(self, layer: int, rows: torch.Tensor, kv: torch.Tensor) -> None:
        """Store kv [T, 2 * Hkv * D] (K heads, then V heads) at the rows of slot_rows(slots)."""
        self.layers[layer].view(-1, self.head_dim).index_copy_(0, rows, kv.reshape(-1, self.head_dim))
