"""CpuKVCache: a KVCache in the layout of the C kernels (c/attention/cache_layout.h), which multiply it without a copy.

A chunk is 16 tokens. Its unit is 4 bytes: a pair of bfloat16, or one float32. K of a chunk is [pairs of dimensions,
token], V is [pairs of tokens, dimension]. A head's width is padded to a multiple of 16. Blocks of fewer than 16 tokens
are plain rows. The kernels read and write the arrays directly; the methods here serve tests and reference code.
"""

import copy
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from kernels.arrays import Ints
from kernels.cpu.library import ELEMENT_NUMBERS
from kernels.cpu.structs import CacheShape
from kernels.elements import Dtype, Numbers
from kernels.memory.kv_cache import KVCache, bytes_per_block
from kernels.rounding import round_up

CHUNK = 16  # in tokens


def padded_dim(head_dim: int) -> int:
    """Return a head's width in the cache: head_dim rounded up to a multiple of 16."""
    return round_up(head_dim, 16)


class CpuKVCache(KVCache):
    """A KV cache in the C kernels' layout. Errors: MemoryError with the sizes if it cannot be allocated."""

    layers: Sequence[Numbers]
    #: Name of the form of the numbers in memory; "" = they have the cache's dtype.
    stored_as: ClassVar[str] = ""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        *,
        head_dim: int,
        dtype: Dtype,
        value_dim: int | None = None,
    ) -> None:
        """value_dim: if given, V is not stored; it is the first value_dim numbers of K. None = V is stored."""
        width, stored = self.stored_width(head_dim, dtype)
        self.num_sides = 2 if value_dim is None else 1
        super().__init__(
            num_layers, num_blocks, block_size, num_kv_heads, head_dim=width, dtype=stored, num_sides=self.num_sides
        )
        self.head_dim, self.dtype = head_dim, dtype
        self.chunk = min(CHUNK, block_size)  # tokens that are stored together
        sizes, is_quantized = (num_kv_heads, head_dim, block_size), bool(self.stored_as)
        token_bytes = width * stored.itemsize
        self.value_dim = head_dim if value_dim is None else value_dim
        element, block_bytes = ELEMENT_NUMBERS[dtype], self.num_sides * num_kv_heads * block_size * token_bytes
        self.shape = CacheShape(*sizes, element, is_quantized, token_bytes, self.num_sides, self.value_dim, block_bytes)

    def within(self, num_kv_heads: int, head_dim: int, places: Sequence[tuple[int, int]]) -> "CpuKVCache":
        """Return a cache of layers with other heads, in this one's memory, in which nothing has been written yet.

        places: of each layer, its array, and the place of its block behind the first one of a page: so many blocks of
        its own size further. Its tables have the numbers of pages' first blocks (core/models/layers/cache_pages.py).
        """
        other = copy.copy(self)
        width, stored = self.stored_width(head_dim, self.dtype)
        shape = self.num_sides, num_kv_heads, self.block_size, width
        own, step = math.prod(shape) * stored.itemsize, self.shape.block_bytes
        other.num_kv_heads, other.head_dim, other.value_dim, other.memory = num_kv_heads, head_dim, head_dim, ()
        other.shape = CacheShape.from_buffer_copy(self.shape)
        other.shape.num_kv_heads, other.shape.head_dim, other.shape.value_dim = num_kv_heads, head_dim, head_dim
        other.shape.token_bytes = width * stored.itemsize
        inner = [math.prod(shape[axis + 1 :]) * stored.itemsize for axis in range(len(shape))]
        layers = []
        for array, place in places:
            numbers = self.memory[array].reshape(-1)[place * own // stored.itemsize :]
            count = (numbers.nbytes - own) // step + 1
            layers.append(np.lib.stride_tricks.as_strided(numbers, (count, *shape), (step, *inner)))
        other.layers = layers
        return other

    @staticmethod
    def stored_width(head_dim: int, dtype: Dtype) -> tuple[int, Dtype]:
        """Return what a token takes in a head, for K or V: number of elements, and their type."""
        return padded_dim(head_dim), dtype

    @classmethod
    def bytes_per_block(
        cls, block_size: int, num_kv_heads: int, head_dim: int, num_layers: int, dtype: Dtype, num_sides: int = 2
    ) -> int:
        """Return the bytes of one block in all layers, K and V together. num_sides: 1 = only K is stored."""
        width, stored = cls.stored_width(head_dim, dtype)
        return bytes_per_block(block_size, num_kv_heads, width, num_layers, stored, num_sides)

    def keys(self, layer: int) -> Numbers:
        """Return a copy of a layer's K in logical order: [num_blocks, block_size, num_kv_heads, head_dim]."""
        return self._logical(self._keys(layer).swapaxes(3, 4))

    def values(self, layer: int) -> Numbers:
        """Return a copy of a layer's V in logical order: [num_blocks, block_size, num_kv_heads, head_dim]."""
        if self.num_sides == 1:
            return self.keys(layer)[..., : self.value_dim]
        return self._logical(self._values(layer).swapaxes(4, 5))

    def write(self, layer: int, slots: Ints, kv: Numbers) -> None:
        """Store kv [T, 2 * Hkv * D] (K heads, then V heads) of the cache's dtype at these slots [T].

        A cache with one side only stores K.
        """
        heads = kv.reshape(len(kv), 2, self.num_kv_heads, self.head_dim)
        keys, values = heads[:, 0], heads[:, 1]
        block, chunk, token = self._places(slots)
        to_keys = self._keys(layer)
        pair = to_keys.shape[-1]
        width = self.head_dim // pair
        to_keys[block, :, chunk, :width, token] = keys.reshape(len(kv), self.num_kv_heads, width, pair)
        if self.num_sides == 1:
            return
        to_values = self._values(layer)
        to_values[block, :, chunk, token // pair, : self.head_dim, token % pair] = values

    def _places(self, slots: Ints) -> tuple[Ints, Ints, Ints]:
        """Return each slot's block, chunk and token in the chunk."""
        return slots // self.block_size, slots % self.block_size // self.chunk, slots % self.chunk

    def _stored(self, layer: int, which: int) -> Numbers:
        """Return a view of K (which = 0) or V (1): [block, head, chunk, what is stored of a chunk]."""
        blocks = self.layers[layer]
        return blocks[:, which].reshape(len(blocks), self.num_kv_heads, self.block_size // self.chunk, -1)

    def _numbers(self, layer: int, which: int) -> Numbers:
        """Return a view of the numbers of K (which = 0) or V (1): [block, head, chunk, number]."""
        return self._stored(layer, which)

    def _keys(self, layer: int) -> Numbers:
        """Return a view of K: [block, head, chunk, D / pair, token, pair]."""
        numbers = self._numbers(layer, 0)
        if self.block_size < CHUNK:
            return numbers.reshape(*numbers.shape[:3], self.block_size, -1, 1).swapaxes(3, 4)
        return numbers.reshape(*numbers.shape[:3], -1, CHUNK, 4 // self.dtype.itemsize)

    def _values(self, layer: int) -> Numbers:
        """Return a view of V: [block, head, chunk, token / pair, D, pair]."""
        numbers = self._numbers(layer, 1)
        pair = 1 if self.block_size < CHUNK else 4 // self.dtype.itemsize
        return numbers.reshape(*numbers.shape[:3], self.chunk // pair, -1, pair)

    def _logical(self, numbers: Numbers) -> Numbers:
        """Return [block, token, head, D] from [block, head, ...] in which tokens come before dimensions."""
        rows = numbers.reshape(len(numbers), self.num_kv_heads, self.block_size, -1)
        return rows[..., : self.head_dim].swapaxes(1, 2)
