"""Layer: one decoder layer, built once from config and weights. Operations that it does not have are `unchanged`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from core.models.config import ModelConfig
from core.models.layer_kinds import kind_of
from core.models.operations import Norm, Operations, Product
from core.models.tensor import Operation, Tensor
from core.models.unchanged import unchanged
from core.models.weight_parts import WeightParts
from ipc.arrays import Floats
from kernels.elements import FLOAT32, Dtype


@dataclass(frozen=True)
class Layer:
    """The operations of one decoder layer.

    hidden += attention_out(o(attention(qkv(input_norm(hidden)))))
    hidden += mlp_out(down(activation(gate_up(mlp_norm(hidden)))))
    """

    kind: int  # see layer_kinds.py
    input_norm: Norm
    qkv: Product
    attention: Callable[[Tensor, Any, int], Tensor]  # rotates, stores K and V, attends
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
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."

    def norm(name: str, to: Dtype = dtype) -> Norm:
        return build_norm(operations, parts, f"{prefix}{name}.weight", config, to)

    def product(names: list[str], has_bias: bool) -> Product:
        weight = parts.take_matrix(*(f"{name}.weight" for name in names))
        if not has_bias:
            return operations.linear(weight)
        return operations.linear(weight, parts.take(*(f"{name}.bias" for name in names)))

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
        attention_out=norm("post_attention_layernorm", FLOAT32) if config.post_norms else unchanged,
        mlp_norm=norm("pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"),
        gate_up=gate_up,
        activation=activation,
        down=product([f"{mlp}down_proj"], False),
        mlp_out=norm("post_feedforward_layernorm", FLOAT32) if config.post_norms else unchanged,
    )


def _head_norms(parts: WeightParts, attention: str, config: ModelConfig) -> Floats | None:
    """Return the norm weights of all query and key heads [H + Hkv, D] float32; None without qk_norm.

    All query heads share one weight, and so do all key heads.
    """
    if not config.qk_norm:
        return None
    weights = [
        np.tile(parts.take(f"{attention}{name}_norm.weight"), (heads, 1))
        for name, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads))
    ]
    return np.concatenate(weights) + np.float32(config.norm_offset)
