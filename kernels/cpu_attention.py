"""CpuAttention: paged attention by the C kernel (kernels/cpu/attention.h); numerics level L2."""

import ctypes
import math

import torch

from kernels.cpu_attention_plan import AttentionPlan
from kernels.cpu_kv_cache import CacheShape, CpuKVCache
from kernels.cpu_library import CpuLibrary
from kernels.scratch import Scratch


class AttentionArguments(ctypes.Structure):
    """struct Attention."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("q", "layer", "out", "block_tables", "items", "merges", "partials", "scratch")
        ),
        ("shape", CacheShape),
        *(
            (name, ctypes.c_int32)
            for name in ("num_heads", "table_width", "num_items", "num_merges", "max_item_tokens", "window")
        ),
        ("scale", ctypes.c_float),
    )


class CpuAttention:
    """Attention of all layers over one cache. A row's bits depend on its own tokens only."""

    def __init__(self, library: CpuLibrary) -> None:
        self._run = library.function("attention", ctypes.POINTER(AttentionArguments))
        pointer = ctypes.POINTER(CacheShape)
        self._scratch_bytes = library.function(
            "attention_scratch_bytes", pointer, ctypes.c_int32, ctypes.c_int32, result=ctypes.c_int64
        )
        self._partial_floats = library.function("attention_partial_floats", ctypes.c_int32, result=ctypes.c_int64)
        self._num_threads = library.function("pool_num_threads", result=ctypes.c_int)
        self._scratch = Scratch()

    def __call__(
        self, q: torch.Tensor, cache: CpuKVCache, layer: int, plan: AttentionPlan, scale: float
    ) -> torch.Tensor:
        """Causal attention of a mixed batch. q [T, H, D] contiguous, rotated, of the cache's dtype -> [T, H * D].

        This step's K and V are in the cache already."""
        assert q.dtype == cache.dtype, (q.dtype, cache.dtype)
        assert q.is_contiguous(), q.stride()
        num_heads, tables = q.shape[1], plan.block_tables
        out = torch.empty((q.shape[0], num_heads * cache.head_dim), dtype=q.dtype)
        scratch_bytes = self._scratch_bytes(cache.shape, num_heads, plan.max_item_tokens) + 64
        scratch = self._scratch.get("scratch", (scratch_bytes * self._num_threads() + 64,), torch.uint8)
        num_partials = plan.num_partials * self._partial_floats(cache.head_dim)
        partials = self._scratch.get("partials", (num_partials,), torch.float32)
        self._run(
            AttentionArguments(
                q.data_ptr(),
                cache.layers[layer].data_ptr(),
                out.data_ptr(),
                tables.ctypes.data,
                plan.items.ctypes.data,
                plan.merges.ctypes.data,
                partials.data_ptr(),
                -(-scratch.data_ptr() // 64) * 64,
                cache.shape,
                num_heads,
                tables.shape[1],
                len(plan.items),
                len(plan.merges),
                plan.max_item_tokens,
                plan.window or 0,
                scale * math.log2(math.e),
            )
        )
        return out
