"""The differences between layers in a GGUF file: heads of two sizes, shared K and V, inputs of single layers.

Errors of all functions: ModelFileError naming the key; UnsupportedModelError.
"""

import math
from typing import Any

from core.model_files.settings.layer_settings import checked_heads, checked_streams, shared_layers
from core.model_files.settings.values import Values
from core.models.architectures.by_name import Architecture
from core.models.config import HeadSizes, PerLayerParts, StreamParts
from core.models.layers.rope_scaling import FrequencyDivisors, ProportionalScaling, RopeScaling
from ipc.files.gguf import GgufHeader

#: Divisors of frequencies from which on a pair is not rotated: llama.cpp's converter writes 1e30.
_STILL = 1e30
#: Settings of layers with a window, which replace those of the others.
_OF_WINDOWS = {
    "head_dim": "head_dim_swa",
    "value_length": "value_length_swa",
    "rotary_dim": "rotary_dim_swa",
}
_TABLE, _RESIDUAL = "per_layer_token_embd.weight", "blk.0.laurel_l.weight"


def without_lists(values: Values, sliding: tuple[int, ...]) -> HeadSizes:
    """Replace the settings of layers with and without a window by those with one; return the heads of the others.

    A setting is a list of one number for each layer, or one with the ending _swa is next to it.
    """
    kv_heads, full_kv_heads = _two(values, "num_key_value_heads", sliding)
    full = HeadSizes(full_kv_heads, values.integer("head_dim"))
    changed = {values.key("num_key_value_heads"): kv_heads}
    for name, own in _OF_WINDOWS.items():
        if values.get(own) is not None:
            changed[values.key(name)] = values.get(own)
    sizes = values.get("intermediate_size")
    if isinstance(sizes, list) and sizes:
        changed[values.key("intermediate_size")] = sizes[0]
    values.values = {**values.values, **changed}
    return full


def _two(values: Values, name: str, sliding: tuple[int, ...]) -> tuple[int, int]:
    """Return a setting of layers with a window, and of those without."""
    listed = values.get(name)
    if not isinstance(listed, list):
        return values.integer(name), values.integer(name)
    kinds = [{number for layer, number in enumerate(listed) if (layer in sliding) == has} for has in (True, False)]
    if len(listed) != values.integer("num_hidden_layers") or any(len(kind) != 1 for kind in kinds):
        values.refuse(name, "a number, or one for the layers with a window and one for the others, is")
    found = [Values({values.key(name): kind.pop()}, values.source, {name: values.key(name)}) for kind in kinds]
    return found[0].integer(name), found[1].integer(name)


def gguf_layer_settings(
    values: Values, header: GgufHeader, full: HeadSizes, sizes: dict[str, Any], sliding: tuple[int, ...]
) -> dict[str, Any]:
    """Return the differences of layers by ModelConfig's names. full: of without_lists(). sizes: of model_sizes()."""
    num_layers = sizes["num_hidden_layers"]
    count = shared_layers(values, num_layers, sliding)
    lasting = [layer for layer in range(num_layers - count) if layer not in sliding]
    plain = HeadSizes(sizes["num_key_value_heads"], sizes["head_dim"])
    return {
        "full_heads": checked_heads(values, full, plain, sizes),
        "full_keys_are_values": any(f"blk.{layer}.attn_v.weight" not in header.tensors for layer in lasting),
        "wide_mlps": _has_wide_mlps(values, header, sizes["intermediate_size"], num_layers - count),
        "num_shared_layers": count,
        "value_norm": True,
        "layer_scales": "blk.0.layer_output_scale.weight" in header.tensors,
        "per_layer": _per_layer_parts(values, header),
    }


def _has_wide_mlps(values: Values, header: GgufHeader, size: int, first: int) -> bool:
    """Return whether MLPs from the layer `first` on are of twice the size."""
    tensor = header.tensors.get(f"blk.{first}.ffn_up.weight")
    return tensor is not None and tensor.shape[0] == 2 * size


def _per_layer_parts(values: Values, header: GgufHeader) -> PerLayerParts | None:
    if values.get("hidden_size_per_layer_input") in (None, 0):
        return None
    if (table := header.tensors.get(_TABLE)) is None:
        values.fail(_TABLE, "is missing")
    return PerLayerParts(width=values.integer("hidden_size_per_layer_input"), vocab_size=table.shape[0])


def gguf_stream_settings(
    values: Values, header: GgufHeader, architecture: Architecture, num_layers: int, sliding: tuple[int, ...]
) -> dict[str, Any]:
    """Return Gemma 3n's settings of layers by ModelConfig's names; empty for others."""
    if not architecture.has_streams:
        return {}
    if (residual := header.tensors.get(_RESIDUAL)) is None:
        values.fail(_RESIDUAL, "is missing")
    defaults = architecture.defaults
    streams = StreamParts(
        count=values.integer("altup_num_inputs", defaults["altup_num_inputs"]),
        active=values.integer("altup_active_idx", defaults["altup_active_idx"]),
        scales_active=True,
        rank=residual.shape[0],
    )
    return {
        "streams": checked_streams(values, streams),
        "sparse_gates": _sparse_gates(values, num_layers),
        "num_shared_layers": shared_layers(values, num_layers, sliding),
        "value_norm": True,
        "per_layer": _per_layer_parts(values, header),
    }


def _sparse_gates(values: Values, num_layers: int) -> tuple[float | None, ...]:
    """Return ModelConfig.sparse_gates. The converter writes minus infinity for layers in which all gates count."""
    found = values.get("activation_sparsity_scale")
    if found is None:
        return ()
    is_list = isinstance(found, list) and len(found) == num_layers
    if not is_list or any(type(one) not in (int, float) or not one < 1e3 for one in found):
        values.fail(
            "activation_sparsity_scale", f"must have a number for each of {num_layers} layers; got {found!r:.80}"
        )
    gates = tuple(None if one == -math.inf else float(one) for one in found)
    return gates if any(one is not None for one in gates) else ()


def as_proportional(scaling: RopeScaling | None, architecture: Architecture) -> RopeScaling | None:
    """Return the scaling; Gemma 4's has divisors of 1 for the first pairs, and those of the others keep them still."""
    if not architecture.full_heads or not isinstance(scaling, FrequencyDivisors):
        return scaling
    num_pairs = sum(divisor < _STILL for divisor in scaling.divisors)
    if any(divisor != 1.0 for divisor in scaling.divisors[:num_pairs]):
        return scaling
    return ProportionalScaling(1.0, num_pairs)
