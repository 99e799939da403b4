"""TorchLatentAttend: one layer's latent attention (kernels/cpu/c/attention/latent.h) made of torch's operations."""

from typing import Any

import torch

from core.models.config import LatentParts
from core.models.operations.latent_weights import LatentWeights
from core.models.operations.stored_matrix import StoredMatrix
from kernels.elements import Dtype
from kernels.torch.attention import paged_attention
from kernels.torch.rms_norm import rms_norm
from kernels.torch.rope import rotate
from kernels.torch.tensors import to_tensor


class TorchLatentAttend:
    """Write the cache, attend, and make the heads' values of the result.

    The cache has V beside K; V is K here, and what rotated numbers yield is left out.
    """

    def __init__(
        self, latent: LatentParts, weights: LatentWeights, kind: int, scale: float, dtype: torch.dtype, stored: Dtype
    ) -> None:
        """stored: dtype as the weights' readers name it."""

        def tensor(matrix: StoredMatrix) -> torch.Tensor:
            return to_tensor(matrix.dense(stored))

        self._parts, self._kind, self._scale, self._dtype = latent, kind, scale, dtype
        self._keys = torch.stack([tensor(each) for each in weights.keys])  # [H, latent_dim, plain_dim]
        self._values = torch.stack([tensor(each) for each in weights.values])  # [H, value_dim, latent_dim]
        self._latent_norm = to_tensor(weights.latent_norm)
        self._query = None if weights.query is None else tensor(weights.query)
        self._query_norm = None if weights.query_norm is None else to_tensor(weights.query_norm)

    @property
    def variant(self) -> str:
        """Name of the choices that fix the results' bits; part of the fingerprint."""
        return "latent"

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x.float(), weight, self._parts.norm_eps, self._dtype)

    def __call__(self, x: torch.Tensor, step: Any, index: int) -> torch.Tensor:
        parts, heads = self._parts, len(self._keys)
        cos, sin = step.tables[self._kind]
        split = [x.shape[1] - parts.latent_dim - parts.rotated_dim, parts.latent_dim, parts.rotated_dim]
        queries, latent, rotated = torch.split(x, split, -1)
        if self._query is not None and self._query_norm is not None:
            queries = self._norm(queries, self._query_norm) @ self._query.T
        key = torch.cat(
            (self._norm(latent, self._latent_norm), rotate(rotated[:, None], cos, sin)[:, 0].to(self._dtype)), -1
        )
        step.cache.write(index, step.write_rows, torch.cat((key, key), -1)[step.write_tokens])
        sizes = [parts.plain_dim, parts.rotated_dim]
        plain, turned = torch.split(queries.reshape(len(x), heads, -1), sizes, -1)
        product = torch.einsum("thp,hlp->thl", plain, self._keys).float()
        q = torch.cat((product, rotate(turned, cos, sin)), -1)
        attended = paged_attention(q, step.cache, index, step.work[self._kind], self._scale)
        sums = attended.view(len(x), heads, -1)[..., : parts.latent_dim]
        return torch.einsum("thl,hvl->thv", sums, self._values).flatten(1)
