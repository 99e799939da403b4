"""Latent attention on a device: K and V of all heads are one vector per token (kernels/cpu/c/attention/latent.h).

A query head is multiplied with its matrix of keys first, so attention has one KV head, whose values are its keys. The
cache has both, although they are equal, and results for rotated numbers are dropped. At most 16 heads share a program
of attention, since the vectors are long: more heads are attended to in turn.
"""

from collections.abc import Callable
from math import gcd

import torch
import triton
import triton.language as tl

from kernels.torch.rope import rotate
from kernels.triton.cache_rows import largest_of, store_rows
from kernels.triton.device import power_of_2
from kernels.triton.kv_cache import TritonKVCache
from kernels.triton.linear import DeviceLinear, DeviceProduct

#: The most heads of a program of attention.
MOST_HEADS = 16

#: Normalises rows, and rounds.
_Norm = Callable[[torch.Tensor], torch.Tensor]
#: Attends for some heads q [T, heads, D], and returns the results.
Attend = Callable[[torch.Tensor], torch.Tensor]


def heads_together(num_heads: int) -> int:
    """Return how many heads a program of attention has."""
    return gcd(num_heads, MOST_HEADS)


@triton.jit
def store_latent_kernel(keys, slots, layer, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store one token's vector as K and as V."""
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < WIDTH
    numbers = tl.load(keys + token.to(tl.int64) * WIDTH + column, mask=inside, other=0.0)
    largest = largest_of(layer, numbers)
    for side in tl.static_range(2):
        store_rows(
            layer, slot // BLOCK_SIZE, side, slot % BLOCK_SIZE, numbers, column, inside, largest, 1, WIDTH, BLOCK_SIZE
        )


def store_latent(keys: torch.Tensor, slots: torch.Tensor, cache: TritonKVCache, layer: int) -> None:
    """Store vectors [T, D] contiguous of the cache's dtype at slots [T] int64; -1 = do not store."""
    store_latent_kernel[(len(keys),)](
        keys,
        slots,
        cache.layers[layer],
        WIDTH=keys.shape[1],
        BLOCK_SIZE=cache.block_size,
        BLOCK=power_of_2(keys.shape[1]),
    )


class TritonLatent:
    """One layer's products around latent attention."""

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        product: DeviceProduct,
        *,
        norm: _Norm,
        query: DeviceLinear | None = None,
        query_norm: _Norm | None = None,
    ) -> None:
        """keys [H, latent_dim, plain_dim], values [H, value_dim, latent_dim], of the model's dtype.

        norm: of the latent vector. query, query_norm: of the queries' own latent vector; None = they have none.
        """
        self._keys, self._values, self._product = keys, values, product
        self._norm, self._query, self._query_norm = norm, query, query_norm
        self.variant = f"latent-{keys.device.type}"

    def begin(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        cache: TritonKVCache,
        layer: int,
    ) -> torch.Tensor:
        """Store the tokens' vectors. Return the queries [T, H, D], for the layer's first product x [T, columns]."""
        heads, latent_dim, plain_dim = self._keys.shape
        rotated_dim = cache.head_dim - latent_dim
        first = x.shape[1] - cache.head_dim
        queries, latent, turned = x[:, :first], x[:, first : first + latent_dim], x[:, first + latent_dim :]
        turned = rotate(turned[:, None], cos, sin)[:, 0].to(x.dtype)
        store_latent(torch.cat((self._norm(latent.contiguous()), turned), 1), slots, cache, layer)
        if self._query is not None and self._query_norm is not None:
            queries = self._query(self._query_norm(queries.contiguous()))
        plain, turned = queries.reshape(len(x), heads, -1).split([plain_dim, rotated_dim], -1)
        return torch.cat((self._of_heads(plain, self._keys), rotate(turned, cos, sin).to(x.dtype)), -1)

    def attend(self, queries: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Return the heads' values [T, H * value_dim]. attend: over the cache, for some heads."""
        together = heads_together(len(self._keys))
        results = [attend(part.contiguous()) for part in queries.split(together, 1)]
        sums = torch.cat(results, 1)[..., : self._keys.shape[1]]
        return self._of_heads(sums, self._values).flatten(1)

    def _of_heads(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return each head's product [T, H, out] of x [T, H, in] with its weight [H, out, in]."""
        out = x.new_empty(len(x), len(weights), weights.shape[1])
        by_head = x.transpose(0, 1).contiguous()
        for head, weight in enumerate(weights):
            self._product(by_head[head], weight, None, out[:, head])
        return out
