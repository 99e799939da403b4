"""Latent attention (kernels/cpu/c/attention/latent.h): its first product and the rest, from a layer's weights."""

import numpy as np

from core.models.config import LatentParts, ModelConfig
from core.models.operations.latent_weights import LatentWeights
from core.models.operations.operations import LatentAttention, Operations, Product
from core.models.operations.stored_matrix import StoredMatrix
from core.models.parts.weight_parts import WeightParts
from kernels.elements import Dtype


def build_latent(
    operations: Operations, parts: WeightParts, prefix: str, config: ModelConfig, kind: int, dtype: Dtype
) -> tuple[Product, LatentAttention]:
    """Build the first product and the attention of the layer with this prefix; see Layer.

    dtype: of the model. Errors: ModelFileError naming tensors that are missing.
    """
    latent = config.latent
    assert latent is not None
    has_query = latent.query_dim is not None
    names = "q_a_proj" if has_query else "q_proj", "kv_a_proj"
    # In the order of the weights' iterator, so that each is packed before the next is read.
    product = operations.linear(parts.take_matrix(*(f"{prefix}{name}.weight" for name in names)))
    query_norm = parts.take(f"{prefix}q_a_norm.weight") if has_query else None
    query = parts.take_matrix(f"{prefix}q_b_proj.weight") if has_query else None
    latent_norm = parts.take(f"{prefix}kv_a_norm.weight")
    keys, values = _heads(parts, prefix, latent, config.num_attention_heads, dtype)
    weights = LatentWeights(keys, values, latent_norm, query, query_norm)
    return product, operations.latent_attention(kind, latent, weights)


def _heads(
    parts: WeightParts, prefix: str, latent: LatentParts, num_heads: int, dtype: Dtype
) -> tuple[list[StoredMatrix], list[StoredMatrix]]:
    """Return the matrices of the heads' keys, transposed, and values."""
    if latent.is_split:
        keys = [parts.take_matrix(f"{prefix}heads.{head}.k_b_proj.weight") for head in range(num_heads)]
        return keys, [parts.take_matrix(f"{prefix}heads.{head}.v_b_proj.weight") for head in range(num_heads)]
    whole, size = parts.take_matrix(f"{prefix}kv_b_proj.weight"), latent.plain_dim + latent.value_dim
    keys, values = [], []
    for first in range(0, num_heads * size, size):
        middle = first + latent.plain_dim
        keys.append(StoredMatrix.of(np.ascontiguousarray(whole.rows(first, middle).dense(dtype).T)))
        values.append(whole.rows(middle, first + size))
    return keys, values
