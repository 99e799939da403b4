"""Layer: one decoder layer, built once from config and weights. Operations that it does not have are `unchanged`."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from core.models.config import ModelConfig
from core.models.layer_kinds import kind_of
from core.models.mixers import Mixer, build_mixer
from core.models.mlp import Mlp, build_mlp
from core.models.operations import Norm, Operations
from core.models.tensor import Operation
from core.models.unchanged import unchanged
from core.models.weight_parts import WeightParts
from kernels.elements import FLOAT32, Dtype


@dataclass(frozen=True)
class Layer:
    """The operations of one decoder layer.

    hidden += attention_out(mixer(input_norm(hidden)))
    hidden += mlp_out(mlp(mlp_norm(hidden)))
    """

    kind: int  # see layer_kinds.py
    input_norm: Norm
    mixer: Mixer  # attention, or what is in place of it
    attention_out: Operation
    mlp_norm: Norm
    mlp: Mlp
    mlp_out: Operation

    @property
    def products(self) -> dict[str, Any]:
        """The layer's products by name; all experts are one, and so are those within latent attention."""
        return {**self.mixer.products, **self.mlp.products}


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

    def norm(name: str, to: Dtype = dtype) -> Norm:
        return build_norm(operations, parts, f"{prefix}{name}.weight", config, to)

    def norm_before(name: str) -> Norm:
        return norm(name) if config.pre_norms else operations.norm(None, config.rms_norm_eps, dtype)

    # In the order of the weights' iterator, so that each is packed before the next is read.
    mixer = build_mixer(operations, parts, config, index, dtype)
    mlp = build_mlp(operations, parts, config, index)
    return Layer(
        kind=kind_of(config, index),
        input_norm=norm_before("input_layernorm"),
        mixer=mixer,
        attention_out=norm("post_attention_layernorm", FLOAT32) if config.post_norms else unchanged,
        mlp_norm=norm_before("pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"),
        mlp=mlp,
        mlp_out=norm("post_feedforward_layernorm", FLOAT32) if config.post_norms else unchanged,
    )
