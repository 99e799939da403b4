"""The first half of layers, which mixes information from earlier tokens: attention or a recurrent state."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from core.models.config import LatentParts, ModelConfig
from core.models.layers.layer_kinds import kind_of
from core.models.operations.latent_weights import LatentWeights
from core.models.operations.operations import LatentAttention, Operations, Product
from core.models.operations.stored_matrix import StoredMatrix
from core.models.operations.tensor import Tensor
from core.models.parts.weight_parts import WeightParts
from ipc.tables.arrays import Floats
from kernels.elements import FLOAT32, Dtype, to_floats
from kernels.recurrence import RecurrenceParts
from kernels.value_form import SIDES


@dataclass(frozen=True)
class OutputGate:
    """The gate of attention's output: each number, or head, is multiplied by the sigmoid of one of the product."""

    product: Product
    open_gates: Callable[[Tensor, Tensor], Tensor]  # (attention's output, the product's result) -> gated output

    def __call__(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Return attention's output `mixed` [T, H * D], multiplied by the gates computed from attention's input x."""
        return self.open_gates(mixed, self.product(x))


@dataclass(frozen=True)
class Mixer:
    """o(output_gate(mix(qkv(x)), x))."""

    qkv: Product
    mix: Callable[[Tensor, Any, int], Tensor]  # (result of qkv, step, place): attends, or updates a recurrent state
    o: Product
    place: int  # index of the layer's K and V among the caches, or of its state in a request's states
    output_gate: OutputGate | None = None
    latent: LatentAttention | None = None  # the same object as `mix`; None = K and V are cached
    is_recurrent: bool = False

    @property
    def products(self) -> dict[str, Any]:
        """Return the products by name. Those within latent attention are one product."""
        inner: dict[str, Any] = {} if self.output_gate is None else {"gate": self.output_gate.product}
        inner |= {} if self.latent is None else {"latent": self.latent}
        return {"qkv": self.qkv, **inner, "o": self.o}

    def __call__(self, x: Tensor, step: Any) -> Tensor:
        """Return the output [T, hidden] for x [T, hidden]. step: from Operations.step()."""
        mixed = self.mix(self.qkv(x), step, self.place)
        return self.o(mixed if self.output_gate is None else self.output_gate(mixed, x))


def build_mixer(operations: Operations, parts: WeightParts, config: ModelConfig, index: int, dtype: Dtype) -> Mixer:
    """Build the mixer of the layer with this index. dtype: of the model.

    Errors: ModelFileError naming missing tensors.
    """
    if config.latent is not None:
        prefix, kind = f"model.layers.{index}.self_attn.", kind_of(config, index)
        qkv, latent = build_latent(operations, parts, prefix, config, kind, dtype)
        o = _product(operations, parts, f"{prefix}o_proj", has_bias=config.output_bias)
        return Mixer(qkv, latent, o, config.place_of(index), latent=latent)
    build = _recurrence if index in config.recurrent_layers else _attention
    return build(operations, parts, config, index)


def _attention(operations: Operations, parts: WeightParts, config: ModelConfig, index: int) -> Mixer:
    prefix, kind = f"model.layers.{index}.self_attn.", kind_of(config, index)
    # In the order of the weights' iterator, so that each is packed before the next is read.
    values = config.value_form(index)
    names = [f"{prefix}{name}_proj" for name in (("qkv",) if config.fused_qkv else "qkv"[: 1 + SIDES[values]])]
    weight = parts.take_matrix(*(f"{name}.weight" for name in names))
    bias = parts.take(*(f"{name}.bias" for name in names)) if config.qkv_bias else None
    gate = None
    if config.output_gate:  # the rows of q_proj: all queries, then all gates
        size = config.num_attention_heads * config.head_dim
        gates = weight.rows(size, 2 * size)
        weight = weight.without(size, 2 * size)
        biases = None if bias is None else bias[size : 2 * size]
        bias = None if bias is None else np.concatenate((bias[:size], bias[2 * size :]))
        gate = OutputGate(operations.linear(gates, biases), operations.open_gates)
    qkv = operations.linear(weight, bias)
    if config.head_gates:
        gate = OutputGate(operations.linear(parts.take_matrix(f"{prefix}g_proj.weight")), operations.open_gates)
    o = _product(operations, parts, f"{prefix}o_proj", has_bias=config.output_bias)
    sinks = parts.take(f"{prefix}sinks.weight") if config.attention_sinks else None
    attend = operations.attention(kind, _head_norms(parts, prefix, config, index), sinks, values)
    return Mixer(qkv, attend, o, config.place_of(index), gate)


def _head_norms(parts: WeightParts, attention: str, config: ModelConfig, index: int) -> Floats | None:
    """Return the norm weights of all query and key heads [H + Hkv, D] float32; None without qk_norm.

    All query heads share one weight, and so do all key heads; with qk_norm_of_rows or _by_head each has its own. The
    rows of value heads, where they are normalised, follow; a layer that shares K and V has those of query heads only.
    """
    if not config.qk_norm or (config.qk_norm_plain and index in config.unrotated_layers):
        return None
    if config.qk_norm_plain:
        return np.ones((config.num_attention_heads + config.num_key_value_heads, config.head_dim), np.float32)
    if config.qk_norm_of_rows:
        rows = parts.take(*(f"{attention}{name}_norm.weight" for name in "qk"))
        return rows.reshape(-1, config.head_dim) + np.float32(config.norm_offset)
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    if config.qk_norm_by_head:
        names = (f"heads.{head}.{name}_norm.weight" for name, count in heads.items() for head in range(count))
        own = parts.take(*(attention + name for name in names))
        return own.reshape(-1, config.head_dim) + np.float32(config.norm_offset)
    form, count = config.value_form(index), config.heads_of(index).num_key_value_heads
    heads = {"q": config.num_attention_heads} | ({} if form == "shared" else {"k": count})
    weights = [np.tile(parts.take(f"{attention}{name}_norm.weight"), (count, 1)) for name, count in heads.items()]
    weights = [weight + np.float32(config.norm_offset) for weight in weights]
    return np.concatenate(weights if form in ("own", "shared") else [*weights, np.ones_like(weights[1])])


def _recurrence(operations: Operations, parts: WeightParts, config: ModelConfig, index: int) -> Mixer:
    own, prefix = config.recurrent, f"model.layers.{index}.mixer."
    assert own is not None, index
    sizes = own.sizes
    weight = parts.take_matrix(*(f"{prefix}{name}.weight" for name in own.inputs))
    bias = parts.take(*(f"{prefix}{name}.bias" for name in own.inputs)) if own.has_product_biases else None
    qkv = operations.linear(weight, bias)
    names = [f"{prefix}{name}.weight" for name in own.convolution_widths]  # [channels, taps] in files
    kernel = np.ascontiguousarray(to_floats(parts.take_matrix(*names).dense(FLOAT32)).T)
    bias = parts.take(f"{prefix}convolution.bias") if own.has_bias else None
    constants = RecurrenceParts(sizes, kernel, bias)
    if sizes.num_heads:
        rates = parts.take(f"{prefix}rates.weight")
        constants = RecurrenceParts(
            sizes,
            kernel,
            bias,
            rates=np.exp(rates.astype(np.float64)).astype(np.float32) if own.rates_are_logs else -rates,
            step_biases=parts.take(f"{prefix}step.bias"),
            skips=parts.take(f"{prefix}skips.weight") if own.kind == "state space" else None,
            norm=parts.take(f"{prefix}norm.weight") if own.has_norm else None,
            eps=own.norm_eps or config.rms_norm_eps,
            steps=own.steps,
            most_beta=own.most_beta,
        )
    o = _product(operations, parts, f"{prefix}out_proj", has_bias=own.has_product_biases)
    place = config.place_of(index)
    return Mixer(qkv, operations.recurrence(constants, place), o, place, is_recurrent=True)


def _product(operations: Operations, parts: WeightParts, name: str, *, has_bias: bool) -> Product:
    weight = parts.take_matrix(f"{name}.weight")
    return operations.linear(weight, parts.take(f"{name}.bias") if has_bias else None)


# Latent attention (kernels/cpu/c/attention/latent.h): its first product and the rest, built from a layer's weights.


def build_latent(
    operations: Operations, parts: WeightParts, prefix: str, config: ModelConfig, kind: int, dtype: Dtype
) -> tuple[Product, LatentAttention]:
    """Build the first product and the attention of the layer with this prefix; see Layer.

    dtype: of the model. Errors: ModelFileError naming missing tensors.
    """
    latent = config.latent
    assert latent is not None
    has_query = latent.query_dim is not None
    names = "q_a_proj" if has_query else "q_proj", "kv_a_proj"
    # In the order of the weights' iterator, so that each one is packed before the next is read.
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
