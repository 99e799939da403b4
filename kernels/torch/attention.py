"""Paged attention with torch's batched products, for machines without the C kernels and for transformers' models.

Numerics level L0: the order of torch's sums depends on the shapes of a product, and on the CPU model.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from kernels.arrays import AnyInts, Ints
from kernels.memory.kv_cache import KVCache
from kernels.rounding import ceil_div
from kernels.torch.kv_cache import TorchKVCache

#: The most scores (4 bytes each) that one product computes per head. It bounds memory, and fits a CPU's cache.
_MAX_SCORES = 1 << 18


class WorkGroup(NamedTuple):
    """One batched product: n requests with T query tokens each, their contexts padded to L positions."""

    tokens: torch.Tensor  # [n * T] int64 rows of q
    num_requests: int  # n
    context: int  # L, a multiple of block_size
    kv_runs: torch.Tensor  # [2 * n * Hkv * L / block_size] int64 rows (block, K or V, head) of a layer, ordered (K or
    # V, request, head, place in the context); padding is of block 0, the null block
    is_visible: torch.Tensor  # [n, 1, 1, T, L] bool: the query token (T) attends to the position (L)


@dataclass(frozen=True)
class AttentionMetadata:
    """One step's attention work, made once by attention_metadata() and used by every layer."""

    num_tokens: Ints  # [R]
    context_lens: Ints  # [R]
    block_tables: AnyInts  # [R, P]
    window: int | None  # positions that a token attends to, including its own; None = all up to its own
    groups: tuple[WorkGroup, ...]


def attention_metadata(
    num_tokens: AnyInts, context_lens: AnyInts, block_tables: AnyInts, cache: KVCache, window: int | None = None
) -> AttentionMetadata:
    """Return the attention work of a batch whose tokens are packed request after request.

    num_tokens [R] > 0: tokens computed in this step; context_lens [R]: tokens in the cache after it, including these;
    block_tables [R, P]: block ids, enough for context_lens (entries beyond are ignored).
    """
    counts, lengths = num_tokens.astype(np.int64), context_lens.astype(np.int64)
    ends = np.cumsum(counts)  # row of q after each request's tokens
    groups = []
    for requests, positions in _cuts(counts, lengths):
        num_blocks = ceil_div(int(positions.max() + 1), cache.block_size)
        columns = np.arange(num_blocks * cache.block_size)
        is_visible = columns <= positions[:, :, None]
        if window is not None:
            is_visible &= columns > positions[:, :, None] - window
        is_used = np.arange(num_blocks) * cache.block_size <= positions[:, -1:]
        blocks = np.where(is_used, block_tables[requests, :num_blocks], 0).astype(np.int64)
        heads = np.arange(2 * cache.num_kv_heads).reshape(2, 1, -1, 1)
        tokens = positions + (ends - lengths)[requests, None]
        groups.append(
            WorkGroup(
                tokens=torch.from_numpy(tokens.reshape(-1)),
                num_requests=len(requests),
                context=len(columns),
                kv_runs=torch.from_numpy((blocks[:, None] * (2 * cache.num_kv_heads) + heads).reshape(-1)),
                is_visible=torch.from_numpy(is_visible[:, None, None]),
            )
        )
    return AttentionMetadata(counts, lengths, block_tables, window, tuple(groups))


def _cuts(counts: Ints, lengths: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Split a batch into groups of at most _MAX_SCORES scores per head: (requests [n], positions [n, T]).

    Decoding requests are grouped with others of similar context length. A prompt's chunk is split into runs of tokens.
    """
    decoding = np.flatnonzero(counts == 1)
    decoding = decoding[np.argsort(lengths[decoding], kind="stable")[::-1]]
    while len(decoding):
        size = max(1, _MAX_SCORES // int(lengths[decoding[0]]))
        requests, decoding = decoding[:size], decoding[size:]
        yield requests, lengths[requests, None] - 1
    for request in np.flatnonzero(counts > 1):
        length = int(lengths[request])
        size = max(1, _MAX_SCORES // length)
        for start in range(length - int(counts[request]), length, size):
            yield np.array([request]), np.arange(start, min(start + size, length))[None]


def paged_attention(
    q: torch.Tensor,
    cache: TorchKVCache,
    layer: int,
    metadata: AttentionMetadata,
    scale: float,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the causal attention of a mixed batch: q [T, H, D] float32 (rotated) -> [T, H * D], the cache's dtype.

    The step's own K and V are already in the cache. scale multiplies scores, which then become cap * tanh(score / cap).
    sinks [H] float32: an additional score per head, without a value.
    """
    out = torch.empty(q.shape, dtype=cache.layers[layer].dtype)
    for group in metadata.groups:
        out.index_copy_(0, group.tokens, _attend(q, cache, layer, group, scale, cap, sinks).to(out.dtype))
    return out.flatten(1)


def _attend(
    q: torch.Tensor,
    cache: TorchKVCache,
    layer: int,
    group: WorkGroup,
    scale: float,
    cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return the outputs of a group's tokens [n * T, H, D] float32."""
    n, num_heads, num_kv_heads, head_dim = group.num_requests, q.shape[1], cache.num_kv_heads, cache.head_dim
    runs = cache.layers[layer].view(-1, cache.block_size * head_dim).index_select(0, group.kv_runs).float()
    keys, values = runs.view(2, n * num_kv_heads, group.context, head_dim)
    queries = q.index_select(0, group.tokens).view(n, -1, num_kv_heads, num_heads // num_kv_heads, head_dim)
    # The query heads of a KV head are rows of one product: [n * Hkv, G * T, D].
    queries = queries.permute(0, 2, 3, 1, 4).reshape(n * num_kv_heads, -1, head_dim)
    scores = torch.bmm(queries.mul_(scale), keys.transpose(1, 2))
    if cap is not None:
        scores.div_(cap).tanh_().mul_(cap)
    by_token = scores.view(n, num_kv_heads, num_heads // num_kv_heads, -1, group.context)
    by_token.masked_fill_(~group.is_visible, -torch.inf)
    if not values.sum().isfinite():
        # The weight of an invisible position is 0, but 0 * NaN is NaN. So a V that is not finite is set to 0, and for a
        # visible one the score becomes NaN instead.
        is_bad = ~values.isfinite().all(-1).view(n, num_kv_heads, 1, 1, group.context)
        by_token.masked_fill_(is_bad & group.is_visible, torch.nan)
        values.nan_to_num_(0.0, 0.0, 0.0)
    weights = scores.softmax(-1) if sinks is None else _softmax_with_sinks(by_token, sinks).view(scores.shape)
    out = torch.bmm(weights, values).view(n, num_kv_heads, num_heads // num_kv_heads, -1, head_dim)
    return out.permute(0, 3, 1, 2, 4).reshape(-1, num_heads, head_dim)


def _softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return the weights for scores [n, Hkv, G, T, L] if each head has one more score, from sinks [H]."""
    n, num_kv_heads, group_size, num_tokens, _ = scores.shape
    own = sinks.view(1, num_kv_heads, group_size, 1, 1).expand(n, -1, -1, num_tokens, 1)
    return torch.cat((scores, own), -1).softmax(-1)[..., :-1].contiguous()
