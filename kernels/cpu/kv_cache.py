"""CpuKVCache: a KVCache in the layout of the C kernels (kernels/cpu/cache_layout.h), which multiply it without a copy.

A chunk is 16 tokens. Its unit is 4 bytes: a pair of bfloat16, or one float32. K of a chunk is [pairs of dimensions,
token], V is [pairs of tokens, dimension]. A head's width is padded to a multiple of 16. Blocks of fewer than 16 tokens
are plain rows. The kernels read and write the arrays directly; the methods here serve tests and reference code.
"""

from collections.abc import Sequence

from kernels.arrays import Ints
from kernels.cpu.library import ELEMENT_NUMBERS
from kernels.cpu.structs import CacheShape
from kernels.elements import Dtype, Numbers
from kernels.memory.kv_cache import KVCache
from kernels.rounding import round_up

CHUNK = 16  # tokens


def padded_dim(head_dim: int) -> int:
    """Return a head's width in the cache: head_dim rounded up to a multiple of 16."""
    return round_up(head_dim, 16)


class CpuKVCache(KVCache):
    """A KV cache in the C kernels' layout. Errors: MemoryError with the sizes if it cannot be allocated."""

    layers: Sequence[Numbers]

    def __init__(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: Dtype
    ) -> None:
        super().__init__(num_layers, num_blocks, block_size, num_kv_heads, padded_dim(head_dim), dtype)
        self.head_dim = head_dim
        self.shape = CacheShape(num_kv_heads, head_dim, block_size, ELEMENT_NUMBERS[dtype])

    def keys(self, layer: int) -> Numbers:
        """Return a copy of a layer's K in logical order: [num_blocks, block_size, num_kv_heads, head_dim]."""
        return self._logical(self._keys(layer).swapaxes(3, 4))

    def values(self, layer: int) -> Numbers:
        """Return a copy of a layer's V in logical order: [num_blocks, block_size, num_kv_heads, head_dim]."""
        return self._logical(self._values(layer).swapaxes(4, 5))

    def write(self, layer: int, slots: Ints, kv: Numbers) -> None:
        """Store kv [T, 2 * Hkv * D] (K heads, then V heads) of the cache's dtype at these slots [T]."""
        block, chunk, token = (
            slots // self.block_size,
            slots % self.block_size // CHUNK,
            slots % min(CHUNK, self.block_size),
        )
        heads = kv.reshape(len(kv), 2, self.num_kv_heads, self.head_dim)
        keys, values = heads[:, 0], heads[:, 1]
        to_keys, to_values = self._keys(layer), self._values(layer)
        pair = to_keys.shape[-1]
        width = self.head_dim // pair
        to_keys[block, :, chunk, :width, token] = keys.reshape(len(kv), self.num_kv_heads, width, pair)
        to_values[block, :, chunk, token // pair, : self.head_dim, token % pair] = values

    def _keys(self, layer: int) -> Numbers:
        """Return a view of K: [block, head, chunk, D / pair, token, pair]."""
        numbers = self.layers[layer][:, 0]
        if self.block_size < CHUNK:
            return numbers.reshape(*numbers.shape[:2], 1, self.block_size, -1, 1).swapaxes(3, 4)
        pair = 4 // self.dtype.itemsize
        return numbers.reshape(self.num_blocks, self.num_kv_heads, self.block_size // CHUNK, -1, CHUNK, pair)

    def _values(self, layer: int) -> Numbers:
        """Return a view of V: [block, head, chunk, token / pair, D, pair]."""
        numbers = self.layers[layer][:, 1]
        if self.block_size < CHUNK:
            return numbers.reshape(*numbers.shape[:2], 1, self.block_size, -1, 1)
        pair = 4 // self.dtype.itemsize
        shape = (self.num_blocks, self.num_kv_heads, self.block_size // CHUNK, CHUNK // pair, -1, pair)
        return numbers.reshape(shape)

    def _logical(self, numbers: Numbers) -> Numbers:
        """Return [block, token, head, D] of [block, head, ...], where tokens come before dimensions."""
        rows = numbers.reshape(self.num_blocks, self.num_kv_heads, self.block_size, -1)
        return rows[..., : self.head_dim].swapaxes(1, 2)
