"""The settings of layers with a recurrent state, in config.json and in GGUF files.

Errors of all functions: ModelFileError naming the key; UnsupportedModelError.
"""

import math
from collections.abc import Collection
from typing import Any

import msgspec

from core.model_files.settings.values import Values
from core.models.architectures.architecture import Architecture
from core.models.config import RecurrentParts
from kernels.recurrence import MAX_TAPS

RECURRENT_NAMES = ("conv", "linear_attention", "mamba")
#: In the values of a GGUF file: the recurrent layers, which spread_heads() finds.
_LAYERS = "recurrent layers"


def recurrent_parts(values: Values, architecture: Architecture, sizes: dict[str, Any]) -> RecurrentParts | None:
    """Return the properties of the layers with a recurrent state from config.json; None for a model without any.

    sizes: from model_sizes().
    """
    if architecture.recurrent is None:
        return None
    layers = _named_layers(values, sizes["num_hidden_layers"])
    if not layers:
        return None
    if len(layers) == sizes["num_hidden_layers"]:
        values.refuse("layer_types", "a layer with attention is")
    match architecture.recurrent:
        case "short convolution":
            has_bias = values.boolean("conv_bias")
            parts = _convolution(values, layers, sizes["hidden_size"])
            return msgspec.structs.replace(parts, has_bias=has_bias, has_product_biases=has_bias)
        case "gated delta":
            names = ("linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim")
            heads, groups, key_dim, value_dim = (values.integer(name) for name in names)
            parts = _delta(values, layers, (heads, groups, key_dim, value_dim))
            return msgspec.structs.replace(
                parts,
                inputs=architecture.delta_inputs,
                has_split_convolution=architecture.split_convolution,
                norm_eps=architecture.recurrent_norm_eps,
                most_beta=2.0 if values.boolean("linear_allow_neg_eigval") else 1.0,
            )
        case "state space":
            return _state_space(values, layers, sizes["hidden_size"])


def gguf_recurrent_parts(
    values: Values, architecture: Architecture, sizes: dict[str, Any], tensors: Collection[str]
) -> RecurrentParts | None:
    """Return the same from a GGUF file's keys, after spread_heads(). tensors: the names of the file's tensors."""
    layers: tuple[int, ...] = values.values.get(_LAYERS, ())
    if architecture.recurrent is None or not layers:
        return None
    if architecture.recurrent == "short convolution":
        return _convolution(values, layers, sizes["hidden_size"])
    heads, groups = values.integer("linear_num_value_heads"), values.integer("linear_num_key_heads", 1)
    inner = values.integer("mamba_inner_size")
    if inner % heads:
        values.fail("mamba_inner_size", f"must be a multiple of {heads} heads, got {inner}")
    widths = heads, groups, values.integer("linear_key_head_dim"), inner // heads
    if architecture.recurrent == "gated delta":
        parts = _delta(values, layers, widths)
        turns = architecture.gguf_heads_take_turns and heads != groups
        inputs = architecture.gguf_delta_inputs
        return msgspec.structs.replace(parts, rates_are_logs=False, takes_turns=turns, inputs=inputs)
    parts = _with_heads(values, "state space", layers, "linear_conv_kernel_dim", widths)
    has_bias, has_norm = (any(name.endswith(end) for name in tensors) for end in ("ssm_conv1d.bias", "ssm_norm.weight"))
    return msgspec.structs.replace(parts, rates_are_logs=False, has_bias=has_bias, has_norm=has_norm)


def spread_heads(values: Values, architecture: Architecture) -> None:
    """Replace the list of KV heads per layer by their number in layers with attention, and record which have none.

    Files of gated delta nets have one number, and state that every n-th layer has attention.
    """
    heads = values.get("num_key_value_heads")
    if architecture.recurrent == "gated delta" and not isinstance(heads, list):
        count, interval = values.integer("num_hidden_layers"), values.integer("full_attention_interval", 4)
        if values.get("num_nextn_predict_layers") not in (None, 0):  # the last layers, which have attention
            count -= values.integer("num_nextn_predict_layers")
        values.values = {**values.values, _LAYERS: tuple(n for n in range(count) if (n + 1) % interval)}
        return
    if architecture.recurrent is None or not isinstance(heads, list):
        return
    counts = set(heads) - {0}
    if len(counts) != 1 or any(type(count) is not int for count in heads):
        values.refuse("num_key_value_heads", "all layers with attention must be alike")
    layers = tuple(layer for layer, count in enumerate(heads) if count == 0)
    values.values = {**values.values, values.key("num_key_value_heads"): counts.pop(), _LAYERS: layers}


def adjusted_sizes(values: Values, architecture: Architecture) -> None:
    """Rename settings that an architecture names differently, and set the real size of its MLP."""
    names = architecture.settings
    values.values = {**values.values, **{names[key]: value for key, value in values.values.items() if key in names}}
    if architecture.size_factor is not None and values.get("intermediate_size") is None:
        values.values["intermediate_size"] = architecture.size_factor * values.integer("hidden_size")
    if not architecture.adjusts_size or not values.boolean("block_auto_adjust_ff_dim", True):
        return
    unit, size = values.integer("block_multiple_of", 256), values.integer("intermediate_size") * 2 // 3
    if values.get("block_ffn_dim_multiplier") is not None:
        size = int(values.number("block_ffn_dim_multiplier", 1e-3, 1e3) * size)
        size = (size + unit - 1) // unit * unit
    values.values = {**values.values, "intermediate_size": size}


def _named_layers(values: Values, num_layers: int) -> tuple[int, ...]:
    """Return the recurrent layers: from layer_types, from full_attn_idxs, or all but every n-th one."""
    names = values.get("layer_types") or values.get("layers_block_type")
    attending = values.get("full_attn_idxs")
    if names is None and isinstance(attending, list):
        return tuple(layer for layer in range(num_layers) if layer not in attending)
    if names is None and values.get("full_attention_interval") is not None:
        interval = values.integer("full_attention_interval")
        return tuple(layer for layer in range(num_layers) if (layer + 1) % interval)
    if not isinstance(names, list) or len(names) != num_layers:
        values.fail("layer_types", f"must be a list of {num_layers} names, one for each layer; got {names!r:.80}")
    if not {*RECURRENT_NAMES, "attention", "full_attention", "sliding_attention"}.issuperset(map(str, names)):
        values.refuse("layer_types", f"'full_attention' and {', '.join(map(repr, RECURRENT_NAMES))} are")
    return tuple(layer for layer, name in enumerate(names) if name in RECURRENT_NAMES)


def _convolution(values: Values, layers: tuple[int, ...], channels: int) -> RecurrentParts:
    taps = _taps(values, "conv_L_cache")
    return RecurrentParts(kind="short convolution", layers=layers, taps=taps, channels=channels)


def _delta(values: Values, layers: tuple[int, ...], widths: tuple[int, int, int, int]) -> RecurrentParts:
    return _with_heads(values, "gated delta", layers, "linear_conv_kernel_dim", widths)


def _state_space(values: Values, layers: tuple[int, ...], hidden: int) -> RecurrentParts:
    heads, groups = values.integer("mamba_n_heads"), values.integer("mamba_n_groups")
    if values.get("mamba_d_ssm") is not None:
        inner = values.integer("mamba_d_ssm")
    elif values.get("mamba_expand") is None:
        inner = heads * values.integer("mamba_d_head")
    else:
        inner = int(values.number("mamba_expand", 1e-3, 1e3) * hidden)
    if inner % heads or values.get("mamba_d_head") not in (None, "auto", inner // heads):
        values.fail("mamba_d_head", f"must be {inner} / {heads}, the width by the number of heads")
    if values.boolean("mamba_proj_bias"):
        values.refuse("mamba_proj_bias", "only false is")
    widths = heads, groups, values.integer("mamba_d_state"), inner // heads
    parts = _with_heads(values, "state space", layers, "mamba_d_conv", widths)
    has_bias, has_norm = values.boolean("mamba_conv_bias"), values.boolean("mamba_rms_norm", True)
    if has_norm and values.boolean("mamba_norm_before_gate"):
        values.refuse("mamba_norm_before_gate", "with mamba_rms_norm only false is")
    return msgspec.structs.replace(parts, has_bias=has_bias, has_norm=has_norm, steps=_steps(values))


def _steps(values: Values) -> tuple[float, float]:
    """Return a state space's smallest and largest step. transformers 5 writes infinity as an object."""
    limits = values.get("time_step_limit") or (0.0, math.inf)
    numbers = [math.inf if one == {"__float__": "Infinity"} else one for one in limits]
    if len(numbers) != 2 or any(type(one) not in (int, float) for one in numbers):
        values.fail("time_step_limit", f"must be two numbers, got {limits!r:.80}")
    return float(numbers[0]), float(numbers[1])


def _with_heads(
    values: Values, kind: Any, layers: tuple[int, ...], taps: str, widths: tuple[int, int, int, int]
) -> RecurrentParts:
    """Return layers of this kind.

    taps: their setting. widths: number of value heads and key heads, and widths of keys and values.
    """
    heads, groups, key_dim, value_dim = widths
    if heads % groups:
        values.fail("linear_num_key_heads", f"must divide the {heads} heads of values, got {groups}")
    if key_dim % 2:
        values.refuse("linear_key_head_dim", "even numbers are")
    return RecurrentParts(
        kind=kind,
        layers=layers,
        taps=_taps(values, taps),
        channels=2 * groups * key_dim + heads * value_dim,
        num_heads=heads,
        num_groups=groups,
        key_dim=key_dim,
        value_dim=value_dim,
    )


def _taps(values: Values, name: str) -> int:
    taps = values.integer(name)
    if not 1 < taps <= MAX_TAPS:
        values.refuse(name, f"2 to {MAX_TAPS} are")
    return taps
