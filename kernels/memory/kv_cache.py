"""The paged KV cache: K and V of every layer in blocks of block_size tokens. This file defines the physical layout.

Logically each layer has keys and values [num_blocks, block_size, num_kv_heads, head_dim]; block 0 is the null block,
which holds zeros and is never written. Physically a layer is one array [num_blocks, 2 (K, V), num_kv_heads, block_size,
head_dim]; a cache with one side only has K (kernels/cpu/c/attention/latent.h). One head's tokens of a block are
contiguous. So gathering whole (block, K or V, head) runs directly yields the operands of a batched product per head,
without a transposition.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from kernels.arrays import Int32s
from kernels.elements import Dtype, Numbers
from kernels.memory.huge_pages import give_back_pages, want_huge_pages
from kernels.memory.shared_file import host_zeros


def bytes_per_block(
    block_size: int, num_kv_heads: int, head_dim: int, num_layers: int, dtype: Dtype, num_sides: int = 2
) -> int:
    """Return the bytes of one block in all layers, K and V together. num_sides: 1 = only K is stored."""
    return num_sides * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize


class Scales(NamedTuple):
    """What K and V of a layer are divided by before they are stored as 8-bit floats."""

    of_keys: float
    of_values: float


#: Of layers without any.
ONES = Scales(1.0, 1.0)


class KVCache:
    """The blocks of all layers in host memory. Subclasses may store them elsewhere, or in another layout.

    Memory is reserved at once but not touched: pages cost nothing until they are written, or allocated ahead
    (kernels/memory/blocks_ahead.py). They are huge if the system has huge pages. Unwritten slots contain arbitrary
    bits, including NaN (except for the null block).

    Errors: MemoryError with the sizes if it cannot be reserved.
    """

    #: One array per layer, starting at block 0. The type depends on the subclass.
    layers: Sequence[Any]
    #: The layers in host memory; empty if the blocks are elsewhere.
    memory: Sequence[Numbers] = ()
    #: Of each layer; () = they are ONES.
    scales: Sequence[Scales] = ()

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        *,
        head_dim: int,
        dtype: Dtype,
        num_sides: int = 2,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        try:
            self.layers = self._allocate(num_layers, (num_blocks, num_sides, num_kv_heads, block_size, head_dim))
        except (RuntimeError, MemoryError) as error:
            size = num_blocks * bytes_per_block(block_size, num_kv_heads, head_dim, num_layers, dtype, num_sides)
            raise MemoryError(
                f"the KV cache of {num_blocks} blocks of {block_size} tokens needs {size} bytes "
                f"in {num_layers} layers, which cannot be allocated: {error}"
            ) from error

    def scales_of(self, layer: int) -> Scales:
        """Return what the layer's K and V are divided by before they are stored."""
        return self.scales[layer] if self.scales else ONES

    def _allocate(self, num_layers: int, shape: tuple[int, ...]) -> Sequence[Any]:
        """Return an array of this shape for each layer, with zeros in block 0. Errors: MemoryError, RuntimeError."""
        # one array for all layers, because only whole huge pages count
        whole = host_zeros((num_layers, *shape), self.dtype)
        want_huge_pages(whole)
        self.memory = list(whole)
        return self.memory

    def share(self, places: Sequence[tuple[int, int]]) -> None:
        """Let more layers use these arrays, each with its array and first block (core/models/layers/cache_pages.py).

        Call this before anything is written: then block 0 of every layer holds zeros.
        """
        self.layers = [self.memory[array][first:] for array, first in places]

    def release(self) -> None:
        """Give the memory of all blocks back to the system, until they are written again. What was in them is lost."""
        for array in self.memory:
            give_back_pages(array)

    @property
    def num_blocks_of_all(self) -> int:
        """Return the number of blocks that every layer has."""
        return min(map(len, self.layers))

    @property
    def layout(self) -> str:
        """Describe everything that the bytes of a block depend on, except the numbers in it."""
        shape = self.block_size, self.num_kv_heads, self.head_dim
        return f"{type(self).__name__} {shape} {len(self.memory)} x {self.memory[0].shape[1:]} {self.memory[0].dtype}"

    def part(self, place: int) -> "tuple[Any, int]":
        """Return the cache whose heads are those of the layer at this place, and the layer's place there."""
        return self, place

    def copy_blocks(self, sources: Int32s, target: "KVCache", targets: Int32s) -> None:
        """Copy whole blocks of all layers to a cache with the same layout, sources[i] to targets[i].

        Within one cache, all sources are read before any target is written.
        """
        if len(sources):
            for layer, other in zip(self.memory, target.memory, strict=True):
                other[targets] = layer[sources]


class MixedKVCache(KVCache):
    """A KV cache of layers whose heads are of several sizes: one cache for each size, with the same blocks.

    A part may lie within the memory of the first one (CpuKVCache.within()); it has no memory of its own then.
    """

    def __init__(self, parts: Sequence[KVCache], places: Sequence[tuple[int, int]]) -> None:
        """places: of each layer, its part, and its place there."""
        first = max(parts, key=lambda part: len(part.memory))
        self.parts, self._places = tuple(parts), tuple(places)
        self.num_blocks, self.block_size, self.dtype = first.num_blocks, first.block_size, first.dtype
        self.memory = [array for part in parts for array in part.memory]
        self.layers = [parts[part].layers[place] for part, place in places]

    def part(self, place: int) -> tuple[KVCache, int]:
        """Return the cache whose heads are those of the layer at this place, and the layer's place there."""
        part, own = self._places[place]
        return self.parts[part], own

    @property
    def layout(self) -> str:
        """What the bytes of a block depend on apart from the numbers in it."""
        return " ".join(part.layout for part in self.parts if part.memory)

    def copy_blocks(self, sources: Int32s, target: KVCache, targets: Int32s) -> None:
        """Copy whole blocks of all layers to a cache of the same layout, sources[i] to targets[i]."""
        assert isinstance(target, MixedKVCache), type(target)
        if len(sources):
            for array, other in zip(self.memory, target.memory, strict=True):
                other[targets] = array[sources]
