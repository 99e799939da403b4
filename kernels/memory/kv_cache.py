"""The paged KV cache: K and V of every layer in blocks of block_size tokens. This file owns the physical layout.

Logically each layer holds keys and values [num_blocks, block_size, num_kv_heads, head_dim]; block 0 is the null block,
which holds zeros and is never written. Physically a layer is one tensor [num_blocks, 2 (K, V), num_kv_heads,
block_size, head_dim]. One head's tokens of a block lie together. So gathering whole (block, K or V, head) runs already
yields the operands of a batched product per head, without a transposition.
"""

import numpy as np
import torch

from kernels.arrays import Int32s
from kernels.memory.huge_pages import want_huge_pages


def bytes_per_block(block_size: int, num_kv_heads: int, head_dim: int, num_layers: int, dtype: torch.dtype) -> int:
    """Return the bytes that one block takes in all layers, K and V together."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize


class KVCache:
    """The blocks of all layers.

    Memory is reserved at once but not touched: pages cost nothing until they are written, or taken ahead
    (kernels/memory/blocks_ahead.py). They are huge where the system has huge pages. Unwritten slots hold arbitrary
    bits, NaN included (except for the null block). device: None = the CPU's memory. pinned: memory of the host that a
    GPU reads and writes by itself.

    Errors: MemoryError with the sizes when it cannot be reserved.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        pinned: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        shape = (num_blocks, 2, num_kv_heads, block_size, head_dim)
        try:
            if pinned:  # one tensor for all layers: torch takes a power of two of bytes for each tensor
                self.layers = list(torch.empty((num_layers, *shape), dtype=dtype, pin_memory=True).unbind())
            elif device is not None:
                self.layers = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
            else:  # one tensor for all layers: only whole huge pages count
                whole = torch.empty((num_layers, *shape), dtype=dtype)
                want_huge_pages(whole)
                self.layers = list(whole.unbind())
        except (RuntimeError, MemoryError) as error:
            size = num_blocks * bytes_per_block(block_size, num_kv_heads, head_dim, num_layers, dtype)
            raise MemoryError(
                f"the KV cache of {num_blocks} blocks of {block_size} tokens needs {size} bytes "
                f"in {num_layers} layers, which cannot be allocated: {error}"
            ) from error
        for tensor in self.layers:
            tensor[0].zero_()

    def keys(self, layer: int) -> torch.Tensor:
        """Return the logical view [num_blocks, block_size, num_kv_heads, head_dim] of a layer's keys."""
        return self.layers[layer][:, 0].transpose(1, 2)

    def values(self, layer: int) -> torch.Tensor:
        """Return the logical view [num_blocks, block_size, num_kv_heads, head_dim] of a layer's values."""
        return self.layers[layer][:, 1].transpose(1, 2)

    def slot_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the rows of a layer to which tokens are written, [T * 2 * Hkv], ordered (token, K or V, head).

        A row has head_dim numbers. slots [T] int64: block * block_size + offset, each >= block_size. The rows are the
        same for every layer.
        """
        block, offset = slots // self.block_size, slots % self.block_size
        heads = torch.arange(2 * self.num_kv_heads)
        return ((block[:, None] * (2 * self.num_kv_heads) + heads) * self.block_size + offset[:, None]).flatten()

    def copy_blocks(self, sources: Int32s, target: "KVCache", targets: Int32s) -> None:
        """Copy whole blocks of all layers to another cache of the same layout, sources[i] to targets[i]."""
        if len(sources):
            read, write = torch.from_numpy(sources.astype(np.int64)), torch.from_numpy(targets.astype(np.int64))
            for layer, other in zip(self.layers, target.layers, strict=True):
                other.index_copy_(0, write, layer.index_select(0, read))

    def write(self, layer: int, rows: torch.Tensor, kv: torch.Tensor) -> None:
        """Store kv [T, 2 * Hkv * D] (K heads, then V heads) at the rows of slot_rows(slots)."""
        self.layers[layer].view(-1, self.head_dim).index_copy_(0, rows, kv.reshape(-1, self.head_dim))
