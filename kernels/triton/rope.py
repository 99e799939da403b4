"""Rotary embedding, head norms and the KV cache write in Triton. The reference is kernels/torch/rope.py."""

import torch
import triton
import triton.language as tl

from kernels.torch.tensors import DTYPES
from kernels.triton.arithmetic.sums import sum_of, sums_of_rows
from kernels.triton.cache_rows import largest_of, store_rows
from kernels.triton.device import power_of_2
from kernels.triton.kv_cache import TritonKVCache
from kernels.value_form import SIDES, ValueForm


@triton.jit
def _total(means):
    """Return the sum of means [heads, 1]."""
    return sum_of(tl.reshape(means, (means.shape[0],)))


@triton.jit
def _mean(numbers, head, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, OF_ROWS: tl.constexpr):
    """Return the mean of each head's numbers [heads, n], or with OF_ROWS those of all Q and all K heads: [heads, 1]."""
    mean = tl.div_rn(sums_of_rows(numbers), HEAD_DIM * 1.0)[:, None]
    if OF_ROWS:
        of_queries = tl.div_rn(_total(tl.where(head < HEADS, mean, 0.0)), HEADS * 1.0)
        of_keys = tl.div_rn(_total(tl.where(head < HEADS, 0.0, mean)), KV_HEADS * 1.0)
        mean = tl.where(head < HEADS, of_queries, of_keys)
    return mean


# fmt: off
@triton.jit
def _normalised(
    first, second, weights, head, i, inside, eps, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    OF_ROWS: tl.constexpr, CENTRED: tl.constexpr, DTYPE: tl.constexpr,
):
    """Return the halves of heads [heads, D / 2] normalised; zeros outside. Whole rows are rounded to DTYPE."""
    if CENTRED:
        mean = _mean(first + second, head, HEADS, KV_HEADS, HEAD_DIM, OF_ROWS)
        first = tl.where(inside, first - mean, 0.0)
        second = tl.where(inside, second - mean, 0.0)
    mean = _mean(first * first + second * second, head, HEADS, KV_HEADS, HEAD_DIM, OF_ROWS)
    norm = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    first = first * norm * tl.load(weights + head * HEAD_DIM + i, mask=inside, other=0.0)
    second = second * norm * tl.load(weights + head * HEAD_DIM + HEAD_DIM // 2 + i, mask=inside, other=0.0)
    if OF_ROWS:
        first = first.to(DTYPE).to(tl.float32)
        second = second.to(DTYPE).to(tl.float32)
    return first, second


@triton.jit
def _write_kv(
    qkv, layer, slot, first, second, head, i, inside, eps, key_scale, value_scale,
    KEYS_AT: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_KV: tl.constexpr, BLOCK_HALF: tl.constexpr, VALUES_AT: tl.constexpr, NORMED_VALUES: tl.constexpr,
):
    """Store a token's K, the halves of its rotated heads [heads, D / 2], and its V, from qkv.

    KEYS_AT, VALUES_AT: heads before the KV_HEADS of K and V in qkv. NORMED_VALUES: each head of V is normalised. 8-bit
    floats are divided by their scale.
    """
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    is_key = inside & (head >= KEYS_AT) & (head < KEYS_AT + KV_HEADS)
    key_head = head - KEYS_AT
    largest = 0
    if layer.dtype.element_ty == tl.uint8:
        first, second = tl.div_rn(first.to(tl.float32), key_scale), tl.div_rn(second.to(tl.float32), key_scale)
    if layer.dtype.element_ty == tl.int8:
        largest = tl.maximum(largest_of(layer, first), largest_of(layer, second))
    store_rows(layer, block, key_head, offset, first, i, is_key, largest, KV_HEADS, HEAD_DIM, BLOCK_SIZE)
    half = HEAD_DIM // 2 + i
    store_rows(layer, block, key_head, offset, second, half, is_key, largest, KV_HEADS, HEAD_DIM, BLOCK_SIZE)
    value_head = tl.arange(0, BLOCK_KV)[:, None]
    j = tl.arange(0, 2 * BLOCK_HALF)[None, :]
    is_value = (value_head < KV_HEADS) & (j < HEAD_DIM)
    value = tl.load(qkv + (VALUES_AT + value_head) * HEAD_DIM + j, mask=is_value, other=0.0)
    if NORMED_VALUES:
        wide = value.to(tl.float32)
        mean = tl.div_rn(sums_of_rows(wide * wide), HEAD_DIM * 1.0)[:, None]
        value = (wide * tl.div_rn(1.0, tl.sqrt_rn(mean + eps))).to(value.dtype)
    if layer.dtype.element_ty == tl.uint8:
        value = tl.div_rn(value.to(tl.float32), value_scale)
    largest = largest_of(layer, value)
    value_head += KV_HEADS
    store_rows(layer, block, value_head, offset, value, j, is_value, largest, KV_HEADS, HEAD_DIM, BLOCK_SIZE)


@triton.jit
def rope_kernel(
    qkv, cos, sin, head_norms, growth, slots, q, layer, eps, key_scale, value_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_HALF: tl.constexpr,
    NORMS: tl.constexpr, OF_ROWS: tl.constexpr, CENTRED: tl.constexpr, AFTER: tl.constexpr, GROWS: tl.constexpr,
    SIDES: tl.constexpr, NORMED_VALUES: tl.constexpr,
    FIRST: tl.constexpr, OWN_HEADS: tl.constexpr, FIRST_KV: tl.constexpr, OWN_KV_HEADS: tl.constexpr,
):
    """Compute one token in each program.

    HEADS, KV_HEADS: of Q and K in qkv. OWN_HEADS, OWN_KV_HEADS: of the results, which begin with those numbered FIRST
    and FIRST_KV. V has these only.

    cos and sin [T, D] float32 come from rotary_tables(): sin's second half is +sin. growth [T]
    float32: factors of queries, if they GROW. SIDES: of K and V, for how many qkv has columns (kernels/value_form.py).
    """
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = HEAD_DIM // 2
    VALUES: tl.constexpr = OWN_KV_HEADS if SIDES > 1 else 0
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    i = tl.arange(0, BLOCK_HALF)[None, :]
    KEYS: tl.constexpr = KV_HEADS if SIDES > 0 else 0
    qkv += token * (HEADS + KEYS + VALUES) * HEAD_DIM
    inside = (head < HEADS + KEYS) & (i < HALF)
    first = tl.load(qkv + head * HEAD_DIM + i, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(qkv + head * HEAD_DIM + HALF + i, mask=inside, other=0.0).to(tl.float32)
    if NORMS and not AFTER:
        first, second = _normalised(
            first, second, head_norms, head, i, inside, eps,
            HEADS, KV_HEADS, HEAD_DIM, OF_ROWS, CENTRED, q.dtype.element_ty,
        )
    cosine = tl.load(cos + token * HEAD_DIM + i, mask=i < HALF, other=0.0)
    sine = tl.load(sin + token * HEAD_DIM + HALF + i, mask=i < HALF, other=0.0)
    turned_first = first * cosine - second * sine
    turned_second = second * cosine + first * sine
    if NORMS and AFTER:
        turned_first, turned_second = _normalised(
            turned_first, turned_second, head_norms, head, i, inside, eps,
            HEADS, KV_HEADS, HEAD_DIM, OF_ROWS, CENTRED, q.dtype.element_ty,
        )
    if GROWS:
        factor = tl.where(head < HEADS, tl.load(growth + token), 1.0)
        turned_first *= factor
        turned_second *= factor
    turned_first = turned_first.to(q.dtype.element_ty)
    turned_second = turned_second.to(q.dtype.element_ty)
    is_query = inside & (head >= FIRST) & (head < FIRST + OWN_HEADS)
    q += (token * OWN_HEADS - FIRST) * HEAD_DIM
    tl.store(q + head * HEAD_DIM + i, turned_first, mask=is_query)
    tl.store(q + head * HEAD_DIM + HALF + i, turned_second, mask=is_query)
    if SIDES > 0:
        slot = tl.load(slots + token)
        if slot >= 0:
            _write_kv(
                qkv, layer, slot, turned_first, turned_second, head, i, inside, eps, key_scale, value_scale,
                HEADS + FIRST_KV, OWN_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_KV, BLOCK_HALF,
                HEADS + (SIDES - 1) * KV_HEADS, NORMED_VALUES,
            )
# fmt: on


class TritonRope:
    """The rotary embedding of one layer.

    head_norms [H + Hkv, D] float32: weights of the norms of Q's and K's heads, before rotation or, if is_after, after
    it; of_rows: all of Q's heads together and all of K's; is_centred: they are layer normalisations. values: what V is;
    rows of the weights for it are not read, because they are ones. row: with of_rows, the heads of Q and K in a row of
    qkv and in head_norms, and the first of the num_heads and of the cache's KV heads that are used; None = they are
    these.
    """

    def __init__(
        self,
        num_heads: int,
        head_norms: torch.Tensor | None = None,
        eps: float = 0.0,
        *,
        of_rows: bool = False,
        is_centred: bool = False,
        is_after: bool = False,
        values: ValueForm = "own",
        row: tuple[int, int, int, int] | None = None,
    ) -> None:
        assert row is None or SIDES[values] != 1, "V of some heads is not read from K of all"
        self.num_heads, self.eps, self._row = num_heads, eps, row
        self.head_norms = None if head_norms is None else head_norms.contiguous()
        self._constants = {
            "NORMS": head_norms is not None,
            "OF_ROWS": of_rows,
            "CENTRED": is_centred,
            "AFTER": is_after,
            "SIDES": SIDES[values],
            "NORMED_VALUES": values in ("normalised", "keys"),
        }

    def __call__(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: TritonKVCache,
        layer: int,
        slots: torch.Tensor,
        growth: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rotate Q and K, store K and V, and return Q [T, H, D] with the cache's dtype.

        qkv [T, (H + 2 * Hkv) * D], or other columns for other values or a row's heads, is of the cache's dtype; cos and
        sin come from rotary_tables; slots [T] int64 (-1: do not store). growth [T] float32: factors of the queries.
        """
        assert qkv.is_contiguous(), qkv.stride()
        dtype = DTYPES[cache.dtype]
        assert qkv.dtype == dtype, (qkv.dtype, dtype)
        assert cache.head_dim % 2 == 0, cache.head_dim
        q = torch.empty((len(qkv), self.num_heads, cache.head_dim), dtype=dtype, device=qkv.device)
        heads, kv_heads, first, first_kv = self._row or (self.num_heads, cache.num_kv_heads, 0, 0)
        if len(qkv):
            rope_kernel[(len(qkv),)](
                qkv,
                cos,
                sin,
                qkv if self.head_norms is None else self.head_norms,
                qkv if growth is None else growth,
                slots,
                q,
                cache.layers[layer],
                self.eps,
                *cache.scales_of(layer),
                HEADS=heads,
                KV_HEADS=kv_heads,
                HEAD_DIM=cache.head_dim,
                BLOCK_SIZE=cache.block_size,
                BLOCK_HEADS=power_of_2(heads + kv_heads),
                BLOCK_KV=power_of_2(cache.num_kv_heads),
                BLOCK_HALF=power_of_2(cache.head_dim // 2),
                GROWS=growth is not None,
                FIRST=first,
                OWN_HEADS=self.num_heads,
                FIRST_KV=first_kv,
                OWN_KV_HEADS=cache.num_kv_heads,
                **self._constants,
            )
        return q
