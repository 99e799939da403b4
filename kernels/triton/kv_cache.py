"""TritonKVCache: a KVCache in device memory, or in pinned host memory, to which blocks are swapped.

The layout is that of the torch path. A head's tokens of a block are contiguous, so a program, which reads one head,
reads whole cache lines.
"""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.arrays import Int32s
from kernels.elements import Dtype
from kernels.memory.kv_cache import KVCache, MixedKVCache, bytes_per_block
from kernels.rounding import round_up
from kernels.torch.tensors import DTYPES
from kernels.triton.device import power_of_2


class TritonKVCache(KVCache):
    """The blocks of all layers. Errors: MemoryError with the sizes if they cannot be reserved.

    pinned: host memory that a GPU reads and writes directly.
    """

    layers: Sequence[torch.Tensor]
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
        device: torch.device,
        pinned: bool = False,
    ) -> None:
        self._device, self._pinned = device, pinned
        width, self._stored = self.stored_width(head_dim, DTYPES[dtype])
        stored = np.dtype((np.void, self._stored.itemsize))  # only its size is looked at
        super().__init__(num_layers, num_blocks, block_size, num_kv_heads, head_dim=width, dtype=stored)
        self.head_dim, self.dtype = head_dim, dtype

    @staticmethod
    def stored_width(head_dim: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Return what a token takes in a head, for K or V: number of elements, and their type."""
        return head_dim, dtype

    @classmethod
    def bytes_per_block(cls, block_size: int, num_kv_heads: int, head_dim: int, num_layers: int, dtype: Dtype) -> int:
        """Return the bytes of one block in all layers, K and V together."""
        width, stored = cls.stored_width(head_dim, DTYPES[dtype])
        return bytes_per_block(block_size, num_kv_heads, width, num_layers, np.dtype((np.void, stored.itemsize)))

    def _allocate(self, num_layers: int, shape: tuple[int, ...]) -> Sequence[torch.Tensor]:
        if self._pinned:  # one tensor for all layers, because torch rounds each tensor up to a power of two of bytes
            layers = [*torch.empty((num_layers, *shape), dtype=self._stored, pin_memory=True).unbind()]
        else:
            layers = [torch.empty(shape, dtype=self._stored, device=self._device) for _ in range(num_layers)]
        for layer in layers:
            layer[0] = 0
        return layers

    def part(self, place: int) -> "tuple[TritonKVCache, int]":
        """Return this cache and the place."""
        return self, place

    @property
    def layout(self) -> str:
        """Describe everything that the bytes of a block depend on, except the numbers in it."""
        return f"{type(self).__name__} {len(self.layers)} x {tuple(self.layers[0].shape[1:])} {self.dtype}"

    def copy_blocks(self, sources: Int32s, target: KVCache, targets: Int32s) -> None:
        """Copy this cache's blocks sources [n] to target's blocks targets [n], in all layers.

        The copies follow the order of the device's stream. The host does not wait for them, so it must not read a
        pinned cache. Within one cache, all sources are read before any target is written.
        """
        if target is self:
            places = [torch.from_numpy(ids.astype(np.int64)).to(self.layers[0].device) for ids in (sources, targets)]
            for layer in self.layers:
                layer[places[1]] = layer[places[0]]
            return
        mine, theirs = self.layers[0].device, target.layers[0].device
        if mine == theirs:
            on_device = [torch.tensor(ids, dtype=torch.int32, device=mine) for ids in (sources, targets)]
            for source, destination in zip(self.layers, target.layers, strict=True):
                copy_blocks(source, on_device[0], destination, on_device[1])
            return
        for first, to, count in _runs(sources, targets):
            for source, destination in zip(self.layers, target.layers, strict=True):
                destination[to : to + count].copy_(source[first : first + count], non_blocking=True)


class MixedTritonKVCache(MixedKVCache):
    """A KV cache of layers whose heads are of several sizes."""

    parts: tuple[TritonKVCache, ...]

    @property
    def layout(self) -> str:
        """Describe everything that the bytes of a block depend on, except the numbers in it."""
        return " ".join(part.layout for part in self.parts)

    def part(self, place: int) -> tuple[TritonKVCache, int]:
        """Return the cache whose heads are those of the layer at this place, and the layer's place there."""
        part, own = self._places[place]
        return self.parts[part], own

    def copy_blocks(self, sources: Int32s, target: KVCache, targets: Int32s) -> None:
        """Copy blocks of all layers, as one of the parts does."""
        assert isinstance(target, MixedTritonKVCache), type(target)
        for part, other in zip(self.parts, target.parts, strict=True):
            part.copy_blocks(sources, other, targets)


class Int8KVCache(TritonKVCache):
    """A KV cache of codes and scales (cache_rows.py).

    The last dimension of a layer, the bytes per token and head, only determines the size: the codes of a head's tokens
    of a block come first, then their scales.
    """

    stored_as = "int8"

    @staticmethod
    def stored_width(head_dim: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Return what a token takes in a head: the codes, padded to whole words, and the bytes of a scale."""
        return round_up(head_dim, 4) + torch.float32.itemsize, torch.int8


class Fp8KVCache(TritonKVCache):
    """A KV cache of 8-bit floats, e4m3 (cache_rows.py)."""

    stored_as = "fp8"

    @staticmethod
    def stored_width(head_dim: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Return what a token takes in a head: the bits of its numbers."""
        return head_dim, torch.uint8


def _runs(sources: Int32s, targets: Int32s) -> list[tuple[int, int, int]]:
    """Return (source, target, count) of blocks that are consecutive on both sides: one transfer each."""
    breaks = (np.diff(sources) != 1) | (np.diff(targets) != 1)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1)) if len(sources) else np.zeros(0, np.int64)
    counts = np.diff(starts, append=len(sources))
    return list(zip(sources[starts].tolist(), targets[starts].tolist(), counts.tolist(), strict=True))


# Copies KV blocks within device memory in Triton: one launch per layer.


_MAX_BLOCK = 2048


@triton.jit
def copy_kernel(source, target, source_ids, target_ids, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Copy BLOCK numbers of one KV block in each program."""
    pair = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    from_row = tl.load(source_ids + pair).to(tl.int64) * WIDTH
    to_row = tl.load(target_ids + pair).to(tl.int64) * WIDTH
    tl.store(target + to_row + column, tl.load(source + from_row + column, mask=inside), mask=inside)


def copy_blocks(source: torch.Tensor, source_ids: torch.Tensor, target: torch.Tensor, target_ids: torch.Tensor) -> None:
    """Copy blocks: target[target_ids] = source[source_ids].

    Both are [blocks, ...] contiguous, with the same dtype and device, and the same shape except for the number of
    blocks. ids [n] int32; no target is named twice or is also a source.
    """
    assert source.is_contiguous(), source.stride()
    assert target.is_contiguous(), target.stride()
    assert source.shape[1:] == target.shape[1:], (source.shape, target.shape)
    assert source.dtype == target.dtype, (source.dtype, target.dtype)
    width = source[0].numel()
    block = min(_MAX_BLOCK, power_of_2(width))
    if len(source_ids):
        grid = (len(source_ids), triton.cdiv(width, block))
        copy_kernel[grid](source, target, source_ids, target_ids, WIDTH=width, BLOCK=block)
