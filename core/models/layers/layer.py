"""Layer: one decoder layer, built once from config and weights. Operations that it lacks are `unchanged`."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from core.models.config import ModelConfig
from core.models.layers.layer_kinds import kind_of
from core.models.layers.mixers import Mixer, build_mixer
from core.models.layers.mlp import Mlp, build_mlp
from core.models.operations.operations import Norm, Operations
from core.models.operations.tensor import Operation
from core.models.operations.unchanged import unchanged
from core.models.parts.weight_parts import WeightParts
from ipc.tables.arrays import Floats
from kernels.elements import FLOAT32, Dtype


@dataclass(frozen=True)
class Layer:
    """The operations of one decoder layer.

    hidden += attention_out(mixer(input_norm(hidden)))
    hidden += mlp_out(mlp(mlp_norm(hidden)))

    With an mlp_norm that precedes, the MLP reads hidden as it was before the first addition.
    """

    kind: int  # see layer_kinds.py
    input_norm: Norm
    mixer: Mixer  # attention, or what replaces it
    attention_out: Operation
    mlp_norm: Norm
    mlp: Mlp
    mlp_out: Operation

    @property
    def products(self) -> dict[str, Any]:
        """Return the layer's products by name.

        All experts are one product, and so are those within latent attention.
        """
        return {**self.mixer.products, **self.mlp.products}


class NormNumbers(NamedTuple):
    """The parameters of a norm, including its offset; no weight = a norm that only rounds."""

    weight: Floats | None
    bias: Floats | None = None

    def build(self, operations: Operations, config: ModelConfig, dtype: Dtype, *, precedes: bool = False) -> Norm:
        """Return the norm. Its results have this dtype. precedes: see Norm.after()."""
        eps, is_centred = config.rms_norm_eps, config.centred_norms
        return operations.norm(self.weight, eps, dtype, bias=self.bias, is_centred=is_centred, precedes=precedes)


def take_norm(parts: WeightParts, name: str, config: ModelConfig) -> NormNumbers:
    """Return the parameters of the norm with this name. Errors: ModelFileError if a tensor is missing."""
    weight = parts.take(f"{name}.weight") + np.float32(config.norm_offset)
    return NormNumbers(weight, parts.take(f"{name}.bias") if config.norm_bias else None)


def build_norm(operations: Operations, parts: WeightParts, name: str, config: ModelConfig, dtype: Dtype) -> Norm:
    """Build the norm with this name. Its results have this dtype. Errors: ModelFileError if a tensor is missing."""
    return take_norm(parts, name, config).build(operations, config, dtype)


def build_layer(
    operations: Operations,
    parts: WeightParts,
    config: ModelConfig,
    index: int,
    dtype: Dtype,
) -> Layer:
    """Build the layer with this index from its weights. Errors: ModelFileError naming missing tensors."""
    prefix = f"model.layers.{index}."

    def before(name: str) -> NormNumbers:
        return take_norm(parts, f"{prefix}{name}", config) if config.pre_norms else NormNumbers(None)

    def after(name: str) -> Operation:
        return build_norm(operations, parts, f"{prefix}{name}", config, FLOAT32) if config.post_norms else unchanged

    # In the order of the weights' iterator, so that each one is packed before the next is read.
    input_norm = before("input_layernorm")
    mixer = build_mixer(operations, parts, config, index, dtype)
    mlp = build_mlp(operations, parts, config, index)
    attention_out, mlp_norm = after("post_attention_layernorm"), input_norm
    if config.residual != "parallel with one norm":
        mlp_norm = before("pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm")
    return Layer(
        kind=kind_of(config, index),
        input_norm=input_norm.build(operations, config, dtype),
        mixer=mixer,
        attention_out=attention_out,
        mlp_norm=mlp_norm.build(operations, config, dtype, precedes=config.residual != "in turn"),
        mlp=mlp,
        mlp_out=after("post_feedforward_layernorm"),
    )
