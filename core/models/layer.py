"""Layer: one decoder layer, built once from config and weights. Operations that it does not have are `unchanged`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from core.models.config import ModelConfig
from core.models.latent import build_latent
from core.models.layer_kinds import kind_of
from core.models.mlp import Mlp, build_mlp
from core.models.operations import LatentAttention, Norm, Operations, Product
from core.models.tensor import Operation, Tensor
from core.models.unchanged import unchanged
from core.models.weight_parts import WeightParts
from ipc.arrays import Floats
from kernels.elements import FLOAT32, Dtype


@dataclass(frozen=True)
class Layer:
    """The operations of one decoder layer.

    hidden += attention_out(o(attention(qkv(input_norm(hidden)))))
    hidden += mlp_out(mlp(mlp_norm(hidden)))
    """

    kind: int  # see layer_kinds.py
    input_norm: Norm
    qkv: Product
    attention: Callable[[Tensor, Any, int], Tensor]  # rotates, stores K and V, attends
    o: Product
    attention_out: Operation
    mlp_norm: Norm
    mlp: Mlp
    mlp_out: Operation

    latent: LatentAttention | None = None  # the same as `attention`; None = K and V are cached

    @property
    def products(self) -> dict[str, Any]:
        """The layer's products by name; all experts are one, and so are those within latent attention."""
        inner = {} if self.latent is None else {"latent": self.latent}
        return {"qkv": self.qkv, **inner, "o": self.o, **self.mlp.products}


def build_norm(operations: Operations, parts: WeightParts, name: str, config: ModelConfig, dtype: Dtype) -> Norm:
    """Build the norm with the named weight; results are of dtype. Errors: ModelFileError if the weight is missing."""
    return operations.norm(parts.take(name) + np.float32(config.norm_offset), config.rms_norm_eps, dtype)


def build_layer(
    operations: Operations,
    parts: WeightParts,
    config: ModelConfig,
    index: int,
    dtype: Dtype,
) -> Layer:
    """Build the layer with this index from its weights. Errors: ModelFileError naming tensors that are missing."""
    prefix = f"model.layers.{index}."
    attention = f"{prefix}self_attn."

    def norm(name: str, to: Dtype = dtype) -> Norm:
        return build_norm(operations, parts, f"{prefix}{name}.weight", config, to)

    def product(names: list[str], has_bias: bool) -> Product:
        weight = parts.take_matrix(*(f"{name}.weight" for name in names))
        if not has_bias:
            return operations.linear(weight)
        return operations.linear(weight, parts.take(*(f"{name}.bias" for name in names)))

    def norm_before(name: str) -> Norm:
        return norm(name) if config.pre_norms else operations.norm(None, config.rms_norm_eps, dtype)

    kind = kind_of(config, index)
    # In the order of the weights' iterator, so that each is packed before the next is read.
    latent = None
    if config.latent is not None:
        qkv, latent = build_latent(operations, parts, attention, config, kind, dtype)
    else:
        names = [f"{attention}{name}_proj" for name in (("qkv",) if config.fused_qkv else "qkv")]
        qkv = product(names, config.qkv_bias)
    o = product([f"{attention}o_proj"], config.output_bias)
    sinks = parts.take(f"{attention}sinks.weight") if config.attention_sinks else None
    mlp = build_mlp(operations, parts, config, index)
    return Layer(
        kind=kind,
        input_norm=norm_before("input_layernorm"),
        qkv=qkv,
        attention=latent or operations.attention(kind, _query_key_norms(parts, attention, config), sinks),
        o=o,
        attention_out=norm("post_attention_layernorm", FLOAT32) if config.post_norms else unchanged,
        mlp_norm=norm_before("pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"),
        mlp=mlp,
        mlp_out=norm("post_feedforward_layernorm", FLOAT32) if config.post_norms else unchanged,
        latent=latent,
    )


def _query_key_norms(parts: WeightParts, attention: str, config: ModelConfig) -> Floats | None:
    """Return the norm weights of all query and key heads [H + Hkv, D] float32; None without qk_norm.

    All query heads share one weight, and so do all key heads; with qk_norm_of_rows each has its own.
    """
    if not config.qk_norm:
        return None
    if config.qk_norm_of_rows:
        rows = parts.take(*(f"{attention}{name}_norm.weight" for name in "qk"))
        return rows.reshape(-1, config.head_dim) + np.float32(config.norm_offset)
    weights = [
        np.tile(parts.take(f"{attention}{name}_norm.weight"), (heads, 1))
        for name, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads))
    ]
    return np.concatenate(weights) + np.float32(config.norm_offset)
