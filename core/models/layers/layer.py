"""Layer: one decoder layer, built once from config and weights. Operations that it lacks are `unchanged`."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from core.models.config import ModelConfig
from core.models.layers.layer_kinds import kind_of
from core.models.layers.mixers import Mixer, build_mixer
from core.models.layers.mlp import ExpertsBeside, Mlp, RoutedMlp, build_mlp
from core.models.layers.streams import LayerStreams, build_layer_streams
from core.models.operations.operations import Norm, Operations, PerLayerInputs, Product
from core.models.operations.tensor import Operation, Tensor
from core.models.operations.unchanged import unchanged
from core.models.parts.weight_parts import WeightParts
from ipc.tables.arrays import Floats
from kernels.elements import FLOAT32, Dtype


@dataclass(frozen=True)
class OwnInputs:
    """What a layer makes of inputs that it alone has for each token; it is added to the hidden states."""

    rounding: Norm
    gate: Product
    activation: Operation
    out: Product
    norm: Norm  # to float32

    def __call__(self, hidden: Tensor, inputs: PerLayerInputs, ids: Tensor, projected: Tensor, index: int) -> Tensor:
        """Return what is added [T, d] float32. projected: of inputs.project(). index: of the layer."""
        x = self.activation(self.gate(self.rounding(hidden)))
        return self.norm(self.out(inputs.multiply(x, ids, projected, index)))


@dataclass(frozen=True)
class Layer:
    """The operations of one decoder layer.

    hidden += attention_out(mixer(input_norm(hidden)))
    hidden += mlp_out(mlp(mlp_norm(hidden)))

    With an mlp_norm that precedes, it reads hidden as it was before the first addition. Experts alongside the MLP are
    added to what it yields. Then own_inputs are added, and hidden is multiplied by the scale.
    """

    kind: int  # see layer_kinds.py
    input_norm: Norm
    mixer: Mixer  # attention, or what replaces it
    attention_out: Operation
    mlp_norm: Norm
    mlp: Mlp | None  # None: the layer ends after the first line; mlp_norm and mlp_out are not used
    mlp_out: Operation
    beside: ExpertsBeside | None = None
    own_inputs: OwnInputs | None = None
    scale: float | None = None  # None = hidden is not multiplied
    streams: LayerStreams | None = None  # None = there is one stream of hidden states

    @property
    def products(self) -> dict[str, Any]:
        """The layer's products by name; all experts are one, and so are those within latent attention."""
        more: dict[str, Any] = {} if self.beside is None else self.beside.routed.products
        if self.own_inputs is not None:
            more = more | {"own_gate": self.own_inputs.gate, "own_out": self.own_inputs.out}
        more = more | ({} if self.streams is None else self.streams.products)
        return {**self.mixer.products, **({} if self.mlp is None else self.mlp.products), **more}


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

    has_pre_norms, has_post_norms = config.norms_of(index)

    def before(name: str) -> NormNumbers:
        return take_norm(parts, f"{prefix}{name}", config) if has_pre_norms else NormNumbers(None)

    def after(name: str) -> Operation:
        return build_norm(operations, parts, f"{prefix}{name}", config, FLOAT32) if has_post_norms else unchanged

    # In the order of the weights' iterator, so that each one is packed before the next is read.
    input_norm = before("input_layernorm")
    mixer = build_mixer(operations, parts, config, index, dtype)
    has_mlp = config.has_mlp(index)
    is_dense = config.has_dense_mlp(index)
    mlp = build_mlp(operations, parts, config, index, is_dense=is_dense) if has_mlp else None
    attention_out, mlp_norm = after("post_attention_layernorm"), input_norm
    if config.residual != "parallel with one norm" and has_mlp:
        mlp_norm = before("pre_feedforward_layernorm" if has_post_norms else "post_attention_layernorm")
    return Layer(
        kind=kind_of(config, index),
        input_norm=input_norm.build(operations, config, dtype, precedes=config.is_second_mixer(index)),
        mixer=mixer,
        attention_out=attention_out,
        mlp_norm=mlp_norm.build(operations, config, dtype, precedes=config.residual != "in turn"),
        mlp=mlp,
        mlp_out=after("post_feedforward_layernorm"),
        beside=_experts_beside(operations, parts, config, index, dtype),
        own_inputs=None if config.per_layer is None else _own_inputs(operations, parts, config, index, dtype),
        scale=float(parts.take(f"{prefix}layer_scale.weight").item()) if config.layer_scales else None,
        streams=None
        if config.streams is None
        else build_layer_streams(operations, parts, config, config.streams, index, dtype),
    )


def _experts_beside(
    operations: Operations, parts: WeightParts, config: ModelConfig, index: int, dtype: Dtype
) -> ExpertsBeside | None:
    """Build the experts alongside the layer's dense MLP; None if there are none."""
    if config.experts is None or not config.experts.beside_dense:
        return None
    prefix = f"model.layers.{index}."
    routed = build_mlp(operations, parts, config, index, is_dense=False)
    assert isinstance(routed, RoutedMlp), type(routed)
    scale = parts.take(f"{prefix}mlp.router_norm.weight") * np.float32(config.hidden_size**-0.5)
    return ExpertsBeside(
        build_norm(operations, parts, f"{prefix}experts_layernorm", config, dtype),
        NormNumbers(scale).build(operations, config, dtype),
        routed,
        build_norm(operations, parts, f"{prefix}post_mlp_layernorm", config, FLOAT32),
        build_norm(operations, parts, f"{prefix}post_experts_layernorm", config, FLOAT32),
    )


def _own_inputs(operations: Operations, parts: WeightParts, config: ModelConfig, index: int, dtype: Dtype) -> OwnInputs:
    prefix = f"model.layers.{index}."
    gate, activation = operations.activated(
        parts.take_matrix(f"{prefix}per_layer_input_gate.weight"), config.hidden_act
    )
    return OwnInputs(
        NormNumbers(None).build(operations, config, dtype),
        gate,
        activation,
        operations.linear(parts.take_matrix(f"{prefix}per_layer_projection.weight")),
        build_norm(operations, parts, f"{prefix}post_per_layer_input_norm", config, FLOAT32),
    )
