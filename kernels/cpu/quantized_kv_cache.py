"""QuantizedKVCache: a CpuKVCache with one byte per number and a float32 scale per token and head.

kernels/cpu/c/attention/cache_codes.h defines codes and scales. A read gives a code times its scale, rounded to the
cache's dtype; so the kernels compute with numbers of that dtype, as with any cache. A layer's array is int8; its last
dimension, the bytes per token and head, only determines the size: the codes of a chunk come first, then its scales.
"""

import numpy as np
from numpy.typing import NDArray

from kernels.arrays import Floats, Ints
from kernels.cpu.kv_cache import CpuKVCache
from kernels.elements import Dtype, Numbers, rounded, to_floats

_SCALE_BYTES = 4
_LEAST_LARGEST = np.float32(2.0**-100)
_A_127TH = np.float32(float.fromhex("0x1.020406p-7"))


def quantized(rows: Numbers) -> tuple[NDArray[np.int8], Floats]:
    """Return codes [..., D] and scales [...] for rows [..., D], as computed by the C kernels."""
    numbers = to_floats(rows)
    largest = np.abs(numbers).max(-1)
    scales = (largest * _A_127TH).astype(np.float32)
    scales[largest < _LEAST_LARGEST] = 0
    is_plain = np.isfinite(largest) & (scales != 0)
    scales[~np.isfinite(largest)] = np.nan
    inverse = np.where(is_plain, np.float32(1) / np.where(is_plain, scales, np.float32(1)), np.float32(0))
    with np.errstate(invalid="ignore"):
        codes = np.rint(numbers * inverse[..., None])
    codes[~is_plain] = 0
    return codes.astype(np.int8), scales


class QuantizedKVCache(CpuKVCache):
    """A KV cache of codes and scales. Errors: MemoryError with the sizes if it cannot be allocated."""

    stored_as = "int8"

    @staticmethod
    def stored_width(head_dim: int, dtype: Dtype) -> tuple[int, Dtype]:
        """Return what a token takes in a head: the codes and the bytes of a scale."""
        width, _ = CpuKVCache.stored_width(head_dim, dtype)
        return width + _SCALE_BYTES, np.dtype(np.int8)

    def keys(self, layer: int) -> Numbers:
        """Return a layer's K as read, in logical order: [num_blocks, block_size, num_kv_heads, head_dim]."""
        return self._read(super().keys(layer), layer, 0)

    def values(self, layer: int) -> Numbers:
        """Return a layer's V as read, in logical order: [num_blocks, block_size, num_kv_heads, head_dim]."""
        if self.num_sides == 1:
            return self.keys(layer)[..., : self.value_dim]
        return self._read(super().values(layer), layer, 1)

    def write(self, layer: int, slots: Ints, kv: Numbers) -> None:
        """Quantize kv [T, 2 * Hkv * D] (K heads, then V heads) of the cache's dtype and store it at slots [T]."""
        codes, scales = quantized(kv.reshape(len(kv), 2, self.num_kv_heads, self.head_dim))
        super().write(layer, slots, codes.reshape(kv.shape))
        block, chunk, token = self._places(slots)
        for which in range(self.num_sides):
            self._scales(layer, which)[block, :, chunk, token] = scales[:, which]

    def _numbers(self, layer: int, which: int) -> Numbers:
        return self._stored(layer, which)[..., : -_SCALE_BYTES * self.chunk]

    def _scales(self, layer: int, which: int) -> Floats:
        """Return a view of the scales: [block, head, chunk, token]."""
        scales: Floats = self._stored(layer, which)[..., -_SCALE_BYTES * self.chunk :].view(np.float32)
        return scales

    def _read(self, codes: Numbers, layer: int, which: int) -> Numbers:
        scales = self._logical(self._scales(layer, which))
        return rounded(codes.astype(np.float32) * scales, self.dtype)
