"""CpuAttention: paged attention with the C kernel (kernels/cpu/c/attention/attention.h); numerics level L2."""

import ctypes
import math

import numpy as np

from kernels.arrays import Floats
from kernels.cpu.attention_plan import AttentionPlan
from kernels.cpu.kv_cache import CpuKVCache
from kernels.cpu.library import CpuLibrary
from kernels.cpu.structs import AttentionArguments, CacheShape
from kernels.elements import FLOAT32, Numbers
from kernels.memory.aligned import ALIGNMENT, aligned_empty
from kernels.memory.scratch import Scratch


def score_factors(scale: float, cap: float | None) -> tuple[float, float]:
    """Return the kernel's factors for scores (attention.h): `scale`, and `cap_factor`, which is 0 without a cap."""
    if cap is None:
        return scale * math.log2(math.e), 0.0
    return cap * math.log2(math.e), scale / cap


def sink_scores(sinks: Floats) -> Floats:
    """Return the heads' sinks [H] float32 in the kernel's form, in units of log2."""
    return np.ascontiguousarray(sinks * np.float32(math.log2(math.e)), np.float32)


class CpuAttention:
    """Paged attention for all layers of one cache. A row's bits only depend on its own tokens."""

    def __init__(self, library: CpuLibrary) -> None:
        self._run = library.function("attention", ctypes.POINTER(AttentionArguments))
        pointer = ctypes.POINTER(CacheShape)
        self._scratch_bytes = library.function(
            "attention_scratch_bytes", pointer, ctypes.c_int32, ctypes.c_int32, result=ctypes.c_int64
        )
        self._partial_floats = library.function("attention_partial_floats", ctypes.c_int32, result=ctypes.c_int64)
        self._num_threads = library.function("pool_num_threads", result=ctypes.c_int)
        self._scratch = Scratch()
        self._reserved: tuple[object, ...] = ()  # the sizes for which the scratch was allocated
        self._max_partials = 0
        self._places = (0, 0)  # addresses of partials and scratch

    def __call__(
        self,
        q: Numbers,
        cache: CpuKVCache,
        layer: int,
        plan: AttentionPlan,
        scale: float,
        cap: float | None = None,
        sinks: Floats | None = None,
    ) -> Numbers:
        """Return the attention of a mixed batch: [T, H * Dv] with q's dtype. Dv: the cache's value_dim.

        q is [T, H, D], contiguous, rotated and with the cache's dtype. `scale` multiplies the scores, which then become
        cap * tanh(score / cap). sinks: from sink_scores(). This step's K and V must already be in the cache.
        """
        assert q.dtype == cache.dtype, (q.dtype, cache.dtype)
        assert q.flags.c_contiguous, q.strides
        num_heads = q.shape[1]
        out = aligned_empty((q.shape[0], num_heads * cache.value_dim), q.dtype)
        arguments = AttentionArguments(q=q.ctypes.data, layer=cache.layers[layer].ctypes.data, out=out.ctypes.data)
        arguments.scale, arguments.cap_factor = score_factors(scale, cap)
        arguments.sinks = None if sinks is None else sinks.ctypes.data
        work = plan.arguments
        arguments.block_tables, arguments.table_width = work.blocks, work.width
        arguments.items, arguments.num_items, arguments.members = work.items, work.num_items, work.members
        arguments.merges, arguments.num_merges = work.merges, work.num_merges
        arguments.max_item_tokens = work.max_item_tokens
        arguments.window, arguments.ahead = work.window, work.ahead
        arguments.shape, arguments.num_heads = cache.shape, num_heads
        self.reserve(arguments, cache, plan, num_heads)
        self._run(arguments)
        return out

    def reserve(self, arguments: AttentionArguments, cache: CpuKVCache, plan: AttentionPlan, num_heads: int) -> None:
        """Set the addresses of memory for the plan's partial results and for each thread's scratch.

        The addresses are valid until the next call."""
        num_threads, most = self._num_threads(), plan.arguments.max_item_tokens
        wanted = (num_threads, num_heads, cache.num_kv_heads, cache.head_dim, cache.value_dim, cache.dtype, most)
        if wanted != self._reserved or plan.arguments.num_partials > self._max_partials:
            self._reserved, self._max_partials = wanted, plan.num_partials
            scratch_bytes = self._scratch_bytes(cache.shape, num_heads, most) + ALIGNMENT
            scratch = self._scratch.get("scratch", (scratch_bytes * num_threads,), np.dtype(np.uint8))
            num_floats = plan.num_partials * self._partial_floats(cache.value_dim)
            partials = self._scratch.get("partials", (num_floats,), FLOAT32)
            self._places = partials.ctypes.data, scratch.ctypes.data
        arguments.partials, arguments.scratch = self._places
