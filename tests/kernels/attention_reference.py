"""The oracle of paged attention: in float64, from all scores of a request's tokens and a mask of what each sees."""

import torch

from kernels.rounding import ceil_div
from kernels.torch.attention import AttentionMetadata
from kernels.torch.kv_cache import TorchKVCache

_ROWS = 128  # tokens at once, so that their scores take little memory


def reference_attention(
    q: torch.Tensor,
    cache: TorchKVCache,
    layer: int,
    metadata: AttentionMetadata,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute what paged_attention() does, in float64 -> [T, H * D] float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group_size = q.shape[1] // cache.num_kv_heads
    token = 0
    for index, (num_tokens, context_len) in enumerate(
        zip(metadata.num_tokens.tolist(), metadata.context_lens.tolist(), strict=True)
    ):
        keys, values = _context(cache, layer, metadata, index, context_len)
        keys = keys.double().repeat_interleave(group_size, 1)  # [L, H, D]
        values = values.double().repeat_interleave(group_size, 1)
        for start in range(context_len - num_tokens, context_len, _ROWS):
            positions = torch.arange(start, min(start + _ROWS, context_len))
            rows = slice(token, token + len(positions))
            first = [first_seen(metadata.window, position) for position in positions.tolist()]
            places = torch.arange(context_len)
            is_seen = (places >= torch.tensor(first)[:, None]) & (places <= positions[:, None])
            scores = torch.einsum("thd,lhd->htl", q[rows].double(), keys) * scale
            scores = scores.masked_fill(~is_seen, -torch.inf)
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(positions), 1)), -1)
            out[rows] = torch.einsum("htl,lhd->thd", scores.softmax(-1)[..., :context_len], values)
            token += len(positions)
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
