"""Attention twice more behind paged_attention's signature: the oracle, and torch's own kernel."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention_metadata import AttentionMetadata
from kernels.kv_cache import KVCache
from kernels.rounding import ceil_div


def reference_attention(
    q: torch.Tensor, cache: KVCache, layer: int, metadata: AttentionMetadata, scale: float
) -> torch.Tensor:
    """As paged_attention, plainly: float64, one request and one query after the other. -> [num_rows, H * D] float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group_size = q.shape[1] // cache.num_kv_heads
    token = 0
    for index, (num_tokens, context_len) in enumerate(
        zip(metadata.num_tokens.tolist(), metadata.context_lens.tolist(), strict=True)
    ):
        keys, values = _context(cache, layer, metadata, index, context_len)
        keys = keys.double().repeat_interleave(group_size, 1)  # [L, H, D]
        values = values.double().repeat_interleave(group_size, 1)
        for position in range(context_len - num_tokens, context_len):
            seen = slice(metadata.first_seen(position), position + 1)
            scores = torch.einsum("hd,lhd->hl", q[token].double(), keys[seen]) * scale
            out[token] = torch.einsum("hl,lhd->hd", scores.softmax(-1), values[seen])
            token += 1
    return out.flatten(1)


def sdpa_attention(
    q: torch.Tensor, cache: KVCache, layer: int, metadata: AttentionMetadata, scale: float
) -> torch.Tensor:
    """As paged_attention by torch's scaled_dot_product_attention, request by request: numerics level L0, since its
    bits depend on how a prompt was cut into chunks. -> [num_rows, H * D], the cache's dtype."""
    out = torch.zeros(q.shape, dtype=cache.dtype)
    group_size = q.shape[1] // cache.num_kv_heads
    first = 0
    for index, (num_tokens, context_len) in enumerate(
        zip(metadata.num_tokens.tolist(), metadata.context_lens.tolist(), strict=True)
    ):
        start = metadata.first_seen(context_len - num_tokens)
        context = _context(cache, layer, metadata, index, context_len)
        keys, values = (part[start:].transpose(0, 1) for part in context)
        queries = q[first : first + num_tokens].to(cache.dtype)
        # The query heads of one KV head become rows of one head: K and V are read once (and enable_gqa is slow on CPU).
        rows = queries.view(num_tokens, -1, group_size, cache.head_dim).permute(1, 0, 2, 3).flatten(1, 2)
        own = torch.arange(context_len - num_tokens, context_len)[:, None]
        others = torch.arange(start, context_len)
        seen = (others <= own) & (others > own - (metadata.window or context_len))
        mask = None if num_tokens == 1 else seen.repeat_interleave(group_size, 0)
        result = scaled_dot_product_attention(rows[None], keys[None], values[None], attn_mask=mask, scale=scale)[0]
        result = result.view(-1, num_tokens, group_size, cache.head_dim).permute(1, 0, 2, 3)
        out[first : first + num_tokens] = result.flatten(1, 2)
        first += num_tokens
    return out.flatten(1)


def _context(
    cache: KVCache, layer: int, metadata: AttentionMetadata, index: int, context_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [context_len, Hkv, D] of one request."""
    num_blocks = ceil_div(context_len, cache.block_size)
    blocks = torch.from_numpy(metadata.block_tables[index, :num_blocks].astype("int64"))
    keys = cache.keys(layer).index_select(0, blocks).flatten(0, 1)[:context_len]
    values = cache.values(layer).index_select(0, blocks).flatten(0, 1)[:context_len]
    return keys, values
