"""Rotary embedding, head norms and the KV cache write by Triton; their reference is kernels/torch/rope.py."""

import torch
import triton
import triton.language as tl

from kernels.triton.device import power_of_2
from kernels.triton.kv_cache import TritonKVCache


# fmt: off
@triton.jit
def _rope(
    qkv, cos, sin, head_norms, slots, q, layer, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_HALF: tl.constexpr, NORMS: tl.constexpr,
):
    """Compute one token in each program.

    cos and sin [T, D] float32 come from kernels.torch.rope.rotary_tables: sin's second half is +sin.
    """
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = HEAD_DIM // 2
    qkv += token * (HEADS + 2 * KV_HEADS) * HEAD_DIM
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    i = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (head < HEADS + KV_HEADS) & (i < HALF)
    first = tl.load(qkv + head * HEAD_DIM + i, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(qkv + head * HEAD_DIM + HALF + i, mask=inside, other=0.0).to(tl.float32)
    if NORMS:
        squares = tl.sum(first * first + second * second, 1)[:, None]
        norm = 1.0 / tl.sqrt(squares / HEAD_DIM + eps)
        first = first * norm * tl.load(head_norms + head * HEAD_DIM + i, mask=inside, other=0.0)
        second = second * norm * tl.load(head_norms + head * HEAD_DIM + HALF + i, mask=inside, other=0.0)
    cosine = tl.load(cos + token * HEAD_DIM + i, mask=i < HALF, other=0.0)
    sine = tl.load(sin + token * HEAD_DIM + HALF + i, mask=i < HALF, other=0.0)
    turned_first = (first * cosine - second * sine).to(q.dtype.element_ty)
    turned_second = (second * cosine + first * sine).to(q.dtype.element_ty)

    is_query = inside & (head < HEADS)
    q += token * HEADS * HEAD_DIM
    tl.store(q + head * HEAD_DIM + i, turned_first, mask=is_query)
    tl.store(q + head * HEAD_DIM + HALF + i, turned_second, mask=is_query)

    slot = tl.load(slots + token)
    if slot >= 0:
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        is_key = inside & (head >= HEADS)
        row = ((block * 2 * KV_HEADS + head - HEADS) * BLOCK_SIZE + offset) * HEAD_DIM
        tl.store(layer + row + i, turned_first, mask=is_key)
        tl.store(layer + row + HALF + i, turned_second, mask=is_key)
        value_head = tl.arange(0, BLOCK_KV)[:, None]
        j = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        is_value = (value_head < KV_HEADS) & (j < HEAD_DIM)
        value = tl.load(qkv + (HEADS + KV_HEADS + value_head) * HEAD_DIM + j, mask=is_value)
        value_row = ((block * 2 * KV_HEADS + KV_HEADS + value_head) * BLOCK_SIZE + offset) * HEAD_DIM
        tl.store(layer + value_row + j, value, mask=is_value)
# fmt: on


class TritonRope:
    """The rotary embedding of one layer.

    head_norms [H + Hkv, D] float32: weights of the norms of Q's and K's heads, before rotation.
    """

    def __init__(self, num_heads: int, head_norms: torch.Tensor | None = None, eps: float = 0.0) -> None:
        self.num_heads, self.eps = num_heads, eps
        self.head_norms = None if head_norms is None else head_norms.contiguous()

    def __call__(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: TritonKVCache,
        layer: int,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Rotate Q and K, store K and V; return Q [T, H, D] of the cache's dtype.

        qkv [T, (H + 2 * Hkv) * D] is in the cache's dtype; cos and sin come from rotary_tables; slots [T] int64 (-1: do
        not store).
        """
        assert qkv.is_contiguous(), qkv.stride()
        dtype = cache.layers[layer].dtype
        assert qkv.dtype == dtype, (qkv.dtype, dtype)
        assert cache.head_dim % 2 == 0, cache.head_dim
        q = torch.empty((len(qkv), self.num_heads, cache.head_dim), dtype=dtype, device=qkv.device)
        if len(qkv):
            _rope[(len(qkv),)](
                qkv,
                cos,
                sin,
                qkv if self.head_norms is None else self.head_norms,
                slots,
                q,
                cache.layers[layer],
                self.eps,
                HEADS=self.num_heads,
                KV_HEADS=cache.num_kv_heads,
                HEAD_DIM=cache.head_dim,
                BLOCK_SIZE=cache.block_size,
                BLOCK_HEADS=power_of_2(self.num_heads + cache.num_kv_heads),
                BLOCK_KV=power_of_2(cache.num_kv_heads),
                BLOCK_HALF=power_of_2(cache.head_dim // 2),
                NORMS=self.head_norms is not None,
            )
        return q
