"""Layer: one decoder layer, put together once from config and weights. What an architecture lacks is `unchanged`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from core.models.config import Activation, ModelConfig
from core.models.weight_parts import WeightParts
from kernels.cpu_library import CpuLibrary
from kernels.gated_activation import SIGMOID_, SILU_, gelu_tanh_mul, silu_mul
from kernels.linear import PackedLinear
from kernels.rms_norm import rms_norm
from kernels.whole_vectors import ElementwiseInPlace

Operation = Callable[[torch.Tensor], torch.Tensor]


class Gate(NamedTuple):
    """A gated activation, and the elementwise function it rests on, which is probed."""

    operation: Operation
    function_: ElementwiseInPlace


GATES: dict[Activation, Gate] = {
    "silu": Gate(silu_mul, SILU_),
    "gelu_pytorch_tanh": Gate(gelu_tanh_mul, SIGMOID_),
}


@dataclass(frozen=True)
class Norm:
    """Root mean square normalisation of the last dimension; rounds once, to dtype."""

    weight: torch.Tensor  # float32, [d] or [heads, d]
    eps: float
    dtype: torch.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x.float(), self.weight, self.eps, self.dtype)


def unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass(frozen=True)
class Layer:
    """hidden += attention_out(o(attention(heads(qkv(input_norm(hidden)))))), and the same with the MLP."""

    kind: int  # 0: sees everything, -1: slides. Index into what a step has for each kind, or once for both
    input_norm: Norm
    qkv: PackedLinear
    heads: Operation  # of Q and K, before they are rotated; float32
    o: PackedLinear
    attention_out: Operation
    mlp_norm: Norm
    gate_up: PackedLinear
    activation: Operation
    down: PackedLinear
    mlp_out: Operation

    @property
    def products(self) -> dict[str, PackedLinear]:
        return {"qkv": self.qkv, "o": self.o, "gate_up": self.gate_up, "down": self.down}


def build_norm(parts: WeightParts, name: str, config: ModelConfig, dtype: torch.dtype) -> Norm:
    return Norm(parts.take(name).float() + config.norm_offset, config.rms_norm_eps, dtype)


def build_layer(
    parts: WeightParts, config: ModelConfig, index: int, dtype: torch.dtype, library: CpuLibrary | None
) -> Layer:
    """library: of the C kernels, None = torch's. Errors: ModelFileError naming tensors that are missing."""
    prefix = f"model.layers.{index}."
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."

    def norm(name: str, to: torch.dtype = dtype) -> Norm:
        return build_norm(parts, f"{prefix}{name}.weight", config, to)

    def product(names: list[str], has_bias: bool) -> PackedLinear:
        weight = parts.take(*(f"{name}.weight" for name in names))
        if not has_bias:
            return PackedLinear(weight, None, library)
        bias = parts.take(*(f"{name}.bias" for name in names))
        return PackedLinear(weight, bias.to(torch.float32, copy=True), library)  # no view of a mapped file

    qkv_names = [f"{attention}{name}_proj" for name in "qkv"]
    return Layer(
        kind=-1 if index in config.sliding_layers else 0,
        input_norm=norm("input_layernorm"),
        qkv=product(qkv_names, config.qkv_bias),
        heads=_head_norm(parts, attention, config) if config.qk_norm else torch.Tensor.float,
        o=product([f"{attention}o_proj"], config.output_bias),
        attention_out=norm("post_attention_layernorm", torch.float32) if config.post_norms else unchanged,
        mlp_norm=norm("pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"),
        gate_up=product([f"{mlp}gate_proj", f"{mlp}up_proj"], False),
        activation=GATES[config.hidden_act].operation,
        down=product([f"{mlp}down_proj"], False),
        mlp_out=norm("post_feedforward_layernorm", torch.float32) if config.post_norms else unchanged,
    )


def _head_norm(parts: WeightParts, attention: str, config: ModelConfig) -> Norm:
    """One weight for all query heads and one for all key heads."""
    weights = torch.cat(
        [
            parts.take(f"{attention}{name}_norm.weight").float().expand(heads, -1)
            for name, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads))
        ]
    )
    return Norm(weights + config.norm_offset, config.rms_norm_eps, torch.float32)
