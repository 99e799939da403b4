"""Layer: one decoder layer, built once from config and weights. Operations that it does not have are `unchanged`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from core.models.config import ModelConfig
from core.models.layer_kinds import kind_of
from core.models.operations import Norm, Operations, Product
from core.models.unchanged import unchanged
from core.models.weight_parts import WeightParts
from kernels.torch.linear import Operation


@dataclass(frozen=True)
class Layer:
    """The operations of one decoder layer.

    hidden += attention_out(o(attention(qkv(input_norm(hidden)))))
    hidden += mlp_out(down(activation(gate_up(mlp_norm(hidden)))))
    """

    kind: int  # see layer_kinds.py
    input_norm: Norm
    qkv: Product
    attention: Callable[[torch.Tensor, Any, int], torch.Tensor]  # rotates, stores K and V, attends
    o: Product
    attention_out: Operation
    mlp_norm: Norm
    gate_up: Product
    activation: Operation
    down: Product
    mlp_out: Operation

    @property
    def products(self) -> dict[str, Product]:
        """The layer's products by name."""
        return {"qkv": self.qkv, "o": self.o, "gate_up": self.gate_up, "down": self.down}


def build_norm(operations: Operations, parts: WeightParts, name: str, config: ModelConfig, dtype: torch.dtype) -> Norm:
    """Build the norm with the named weight; results are of dtype. Errors: ModelFileError if the weight is missing."""
    return operations.norm(parts.take(name).float() + config.norm_offset, config.rms_norm_eps, dtype)


def build_layer(
    operations: Operations,
    parts: WeightParts,
    config: ModelConfig,
    index: int,
    dtype: torch.dtype,
) -> Layer:
    """Build the layer with this index from its weights. Errors: ModelFileError naming tensors that are missing."""
    prefix = f"model.layers.{index}."
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."

    def norm(name: str, to: torch.dtype = dtype) -> Norm:
        return build_norm(operations, parts, f"{prefix}{name}.weight", config, to)

    def product(names: list[str], has_bias: bool) -> Product:
        weight = parts.take_matrix(*(f"{name}.weight" for name in names))
        if not has_bias:
            return operations.linear(weight)
        bias = parts.take(*(f"{name}.bias" for name in names))
        return operations.linear(weight, bias.to(torch.float32, copy=True))  # no view of a mapped file

    kind = kind_of(config, index)
    # In the order of the weights' iterator, so that each is packed before the next is read.
    qkv = product([f"{attention}{name}_proj" for name in "qkv"], config.qkv_bias)
    o = product([f"{attention}o_proj"], config.output_bias)
    gate_up_weight = parts.take_matrix(f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight")
    gate_up, activation = operations.gate_up(gate_up_weight, config.hidden_act)
    del gate_up_weight
    scale = (config.query_pre_attn_scalar or config.head_dim) ** -0.5
    return Layer(
        kind=kind,
        input_norm=norm("input_layernorm"),
        qkv=qkv,
        attention=operations.attention(kind, _head_norms(parts, attention, config), config.rms_norm_eps, scale),
        o=o,
        attention_out=norm("post_attention_layernorm", torch.float32) if config.post_norms else unchanged,
        mlp_norm=norm("pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"),
        gate_up=gate_up,
        activation=activation,
        down=product([f"{mlp}down_proj"], False),
        mlp_out=norm("post_feedforward_layernorm", torch.float32) if config.post_norms else unchanged,
    )


def _head_norms(parts: WeightParts, attention: str, config: ModelConfig) -> torch.Tensor | None:
    """Return the norm weights of all query and key heads [H + Hkv, D] float32; None without qk_norm.

    All query heads share one weight, and so do all key heads.
    """
    if not config.qk_norm:
        return None
    weights = [
        parts.take(f"{attention}{name}_norm.weight").float().expand(heads, -1)
        for name, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads))
    ]
    return torch.cat(weights) + config.norm_offset
