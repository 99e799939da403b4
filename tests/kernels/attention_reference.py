"""The oracle of paged attention: plain float64 loops, one token after another."""

import torch

from kernels.rounding import ceil_div
from kernels.torch.attention import AttentionMetadata
from kernels.torch.kv_cache import TorchKVCache


def reference_attention(
    q: torch.Tensor,
    cache: TorchKVCache,
    layer: int,
    metadata: AttentionMetadata,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute what paged_attention() does, in float64 -> [T, H * D] float64.

    A token's bits depend only on its own request up to its own position, because no product's shape depends on anything
    else.
    """
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
            seen = slice(first_seen(metadata.window, position), position + 1)
            scores = torch.einsum("hd,lhd->hl", q[token].double(), keys[seen]) * scale
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, None]), -1)
            out[token] = torch.einsum("hl,lhd->hd", scores.softmax(-1)[:, : len(values[seen])], values[seen])
            token += 1
    return out.flatten(1)


def _context(
    cache: TorchKVCache, layer: int, metadata: AttentionMetadata, index: int, context_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V [context_len, Hkv, D] of one request."""
    num_blocks = ceil_div(context_len, cache.block_size)
    blocks = torch.from_numpy(metadata.block_tables[index, :num_blocks].astype("int64"))
    keys = cache.keys(layer).index_select(0, blocks).flatten(0, 1)[:context_len]
    values = cache.values(layer).index_select(0, blocks).flatten(0, 1)[:context_len]
    return keys, values


def first_seen(window: int | None, position: int) -> int:
    """Return the first position that the token at `position` attends to."""
    return 0 if window is None else max(0, position - window + 1)
