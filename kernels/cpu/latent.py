"""CpuLatent: the parts of latent attention around attention itself, with the C kernels (c/attention/latent.h)."""

import ctypes
from collections.abc import Sequence

import numpy as np

from kernels.arrays import Floats, Ints
from kernels.cpu.gemm import PackedMatrix, blocks_in_8_bits, row_bytes_in_8_bits
from kernels.cpu.kv_cache import CpuKVCache
from kernels.cpu.latent_structs import LatentArguments, LatentStepArguments, LatentValuesArguments
from kernels.cpu.library import CpuLibrary
from kernels.cpu.packed_weights import INT8
from kernels.cpu.rope import RotaryTable
from kernels.cpu.structs import GemmArguments
from kernels.elements import Dtype, Numbers
from kernels.memory.aligned import aligned_empty


class CpuLatent:
    """Computes q and the cache's rows from a layer's first product, and the heads' values from attention's output.

    The columns of the first product are: queries, or their latent vector; the latent vector; the rotated part.
    """

    def __init__(
        self,
        library: CpuLibrary,
        keys: Sequence[PackedMatrix],
        values: Sequence[PackedMatrix],
        latent_norm: Floats,
        *,
        rotated_dim: int,
        eps: float,
        query: PackedMatrix | None = None,
        query_norm: Floats | None = None,
    ) -> None:
        """Prepare the C struct.

        keys, values: per head, [latent_dim, plain_dim] and [value_dim, latent_dim]. latent_norm [latent_dim], and
        query_norm if queries have a latent vector: float32. query: the product that computes heads from that vector;
        None = queries have none.
        """
        assert (query is None) == (query_norm is None), query
        self.keys, self.values, self.query = tuple(keys), tuple(values), query
        self.num_heads, self.rotated_dim = len(keys), rotated_dim
        self.latent_dim, self.plain_dim, self.value_dim = (
            keys[0].out_features,
            keys[0].in_features,
            values[0].out_features,
        )
        self.dtype: Dtype = keys[0].dtype
        self._norms = [None if norm is None else np.ascontiguousarray(norm) for norm in (query_norm, latent_norm)]
        self._matrices = [(GemmArguments * len(each))(*(one.arguments for one in each)) for each in (keys, values)]
        self._query = (GemmArguments * 1)(*([] if query is None else [query.arguments]))
        pointers = [None if norm is None else norm.ctypes.data for norm in self._norms]
        #: The C struct. It points into this object.
        self.arguments = LatentArguments(
            query=None if query is None else ctypes.addressof(self._query),
            keys=ctypes.addressof(self._matrices[0]),
            values=ctypes.addressof(self._matrices[1]),
            query_norm=pointers[0],
            latent_norm=pointers[1],
            num_heads=self.num_heads,
            query_dim=self.queries_width if query is None else query.in_features,
            latent_dim=self.latent_dim,
            plain_dim=self.plain_dim,
            rotated_dim=rotated_dim,
            value_dim=self.value_dim,
            eps=eps,
        )
        self._begin = library.function("latent_begin", ctypes.POINTER(LatentStepArguments))
        self._end = library.function("latent_values", ctypes.POINTER(LatentValuesArguments))

    @property
    def queries_width(self) -> int:
        """Return the width of all query heads before the latent product."""
        return self.num_heads * (self.plain_dim + self.rotated_dim)

    @property
    def matrices(self) -> list[PackedMatrix]:
        """Return all matrices."""
        return [*self.keys, *self.values, *([] if self.query is None else [self.query])]

    @property
    def variant(self) -> str:
        """Return the names of the choices that determine the results' bits; part of the fingerprint."""
        names = [self.keys[0].variant, self.values[0].variant, *([] if self.query is None else [self.query.variant])]
        return "latent+" + "+".join(names)

    def set_streams(self, streams: bool) -> None:
        """Set whether the caches are too small to keep the weights from one step to the next (gemm.h)."""
        for matrices in (*self._matrices, self._query):
            for each in matrices:
                each.streams = streams

    def begin(
        self, qkv: Numbers, table: RotaryTable, positions: Ints, cache: CpuKVCache, layer: int, slots: Ints
    ) -> Numbers:
        """Write the cache and return q [T, H, latent_dim + rotated_dim] with the cache's dtype.

        qkv [T, columns of the first product] with that dtype, contiguous; a latent query is normalised in place.
        positions [T] int64 within the table, slots [T] int64 (-1 = do not store).
        """
        assert qkv.flags.c_contiguous, qkv.strides
        assert qkv.dtype == cache.dtype, (qkv.dtype, cache.dtype)
        count, query = len(qkv), self.query
        q = aligned_empty((count, self.num_heads, self.latent_dim + self.rotated_dim), cache.dtype)
        queries = aligned_empty((count, self.queries_width), cache.dtype)
        step = LatentStepArguments(latent=ctypes.addressof(self.arguments), num_rows=count, shape=cache.shape)
        step.qkv, step.queries, step.q = qkv.ctypes.data, queries.ctypes.data, q.ctypes.data
        tables = table.cos, table.sin, table.query_cos, table.query_sin
        step.cos, step.sin, step.query_cos, step.query_sin = (each.ctypes.data for each in tables)
        step.positions, step.slots, step.layer = (
            positions.ctypes.data,
            slots.ctypes.data,
            cache.layers[layer].ctypes.data,
        )
        if query is not None and query.packing == INT8:
            quantized = aligned_empty((count, row_bytes_in_8_bits(query.in_features)), np.dtype(np.uint8))
            step.quantized, step.quantized_stride = quantized.ctypes.data, blocks_in_8_bits(query.in_features)
        self._begin(step)
        return q

    def expand(self, attended: Numbers) -> Numbers:
        """Return the heads' values [T, H * value_dim] for attention's output [T, H * latent_dim], contiguous."""
        assert attended.flags.c_contiguous, attended.strides
        values = aligned_empty((len(attended), self.num_heads * self.value_dim), attended.dtype)
        self._end(
            LatentValuesArguments(
                ctypes.addressof(self.arguments), attended.ctypes.data, values.ctypes.data, len(attended)
            )
        )
        return values
