"""CpuKVCache: a KVCache in the layout of the C kernels (kernels/cpu/cache_layout.h), which multiply it without a copy.

A chunk is 16 tokens. Its unit is 4 bytes: a pair of bfloat16, or one float32. K of a chunk is [pairs of dimensions,
token], V is [pairs of tokens, dimension]. A head's width is padded to a multiple of 16. Blocks of fewer than 16 tokens
are plain rows. The kernels read and write the tensors directly; the methods here serve tests and reference code.
"""

import torch

from kernels.cpu.library import ELEMENT_TYPES
from kernels.cpu.structs import CacheShape
from kernels.memory.kv_cache import KVCache
from kernels.rounding import round_up

CHUNK = 16  # tokens


def padded_dim(head_dim: int) -> int:
    """Return a head's width in the cache: head_dim rounded up to a multiple of 16."""
    return round_up(head_dim, 16)


class CpuKVCache(KVCache):
    """A KV cache in the C kernels' layout. Errors: MemoryError with the sizes if it cannot be allocated."""

    def __init__(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        super().__init__(num_layers, num_blocks, block_size, num_kv_heads, padded_dim(head_dim), dtype)
        self.head_dim = head_dim
        self.shape = CacheShape(num_kv_heads, head_dim, block_size, ELEMENT_TYPES[dtype])

    def keys(self, layer: int) -> torch.Tensor:
        """Return a copy of a layer's K in logical order: [num_blocks, block_size, num_kv_heads, head_dim]."""
        return self._logical(self._keys(layer).transpose(3, 4))

    def values(self, layer: int) -> torch.Tensor:
        """Return a copy of a layer's V in logical order: [num_blocks, block_size, num_kv_heads, head_dim]."""
        return self._logical(self._values(layer).transpose(4, 5))

    def slot_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Return slots [T] int64 unchanged: write() takes slots."""
        return slots

    def write(self, layer: int, rows: torch.Tensor, kv: torch.Tensor) -> None:
        """Store kv [T, 2 * Hkv * D] (K heads, then V heads) at slots `rows` [T]."""
        block, chunk, token = (
            rows // self.block_size,
            rows % self.block_size // CHUNK,
            rows % min(CHUNK, self.block_size),
        )
        keys, values = kv.view(len(kv), 2, self.num_kv_heads, self.head_dim).unbind(1)
        to_keys, to_values = self._keys(layer), self._values(layer)
        pair = to_keys.shape[-1]
        width = self.head_dim // pair
        to_keys[block, :, chunk, :width, token] = keys.reshape(len(kv), self.num_kv_heads, width, pair)
        to_values[block, :, chunk, token // pair, : self.head_dim, token % pair] = values

    def _keys(self, layer: int) -> torch.Tensor:
        """Return a view of K: [block, head, chunk, D / pair, token, pair]."""
        numbers = self.layers[layer][:, 0]
        if self.block_size < CHUNK:
            return numbers.view(*numbers.shape[:2], 1, self.block_size, -1, 1).transpose(3, 4)
        pair = 4 // self.dtype.itemsize
        return numbers.view(self.num_blocks, self.num_kv_heads, self.block_size // CHUNK, -1, CHUNK, pair)

    def _values(self, layer: int) -> torch.Tensor:
        """Return a view of V: [block, head, chunk, token / pair, D, pair]."""
        numbers = self.layers[layer][:, 1]
        if self.block_size < CHUNK:
            return numbers.view(*numbers.shape[:2], 1, self.block_size, -1, 1)
        pair = 4 // self.dtype.itemsize
        shape = (self.num_blocks, self.num_kv_heads, self.block_size // CHUNK, CHUNK // pair, -1, pair)
        return numbers.view(shape)

    def _logical(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return [block, token, head, D] of [block, head, ...], where tokens come before dimensions."""
        rows = numbers.reshape(self.num_blocks, self.num_kv_heads, self.block_size, -1)
        return rows[..., : self.head_dim].transpose(1, 2)
