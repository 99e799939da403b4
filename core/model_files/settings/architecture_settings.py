"""Settings in config.json of only some architectures: multipliers, soft caps, layers without rotary embedding.

Each function returns fields of ModelConfig. Errors of all: ModelFileError naming the key; UnsupportedModelError.
"""

import math
from typing import Any

from core.model_files.settings.values import Values
from core.models.architectures.by_name import Architecture
from core.models.config import Activation, Residual, RowFactors

_MOST = 1e6  # largest multiplier
#: transformers' names of activations: for MLPs with a gate, and for others.
_GATES: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_pytorch_tanh"}
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "relu2": "relu2",
}


def multipliers(values: Values, architecture: Architecture, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the factors of embeddings, residuals, scores and logits. sizes: from model_sizes()."""
    if architecture.multipliers == "none":
        return {}

    def number(name: str, default: float = 1.0) -> float:
        return values.number(name, 1 / _MOST, _MOST, default)

    if architecture.multipliers == "granite":
        return {
            "embedding_multiplier": number("embedding_multiplier"),
            "residual_multiplier": number("residual_multiplier"),
            "query_pre_attn_scalar": number("attention_multiplier") ** -2,
            "logits_multiplier": 1 / number("logits_scaling"),
        }
    if architecture.multipliers == "cohere":
        return {"logits_multiplier": number("logit_scale")}
    if architecture.multipliers == "falcon":
        return {
            "embedding_multiplier": number("embedding_multiplier"),
            "logits_multiplier": number("lm_head_multiplier"),
            "factors": _falcon_factors(values, sizes),
        }
    return {
        "embedding_multiplier": number("scale_emb"),
        "residual_multiplier": number("scale_depth") / math.sqrt(sizes["num_hidden_layers"]),
        "logits_multiplier": number("dim_model_base", sizes["hidden_size"]) / sizes["hidden_size"],
    }


def _falcon_factors(values: Values, sizes: dict[str, Any]) -> tuple[RowFactors, ...]:
    """Return the factors of Falcon-H1's products (Zuo et al. 2025, arXiv 2507.22448, section 3.2.2).

    Those of a product's input are of its results, too.
    """

    def numbers(name: str, count: int) -> list[float]:
        listed = values.get(name) or [1.0] * count
        if not isinstance(listed, list) or len(listed) != count:
            values.fail(name, f"must be {count} numbers, got {listed!r:.80}")
        return [Values({name: one}, values.source).number(name, 1 / _MOST, _MOST) for one in listed]

    before, after = (values.number(f"attention_{name}_multiplier", 1 / _MOST, _MOST, 1.0) for name in ("in", "out"))
    gate, down = numbers("mlp_multipliers", 2)
    own_before, own_after = (values.number(f"ssm_{name}_multiplier", 1 / _MOST, _MOST, 1.0) for name in ("in", "out"))
    heads, keys = values.integer("mamba_n_heads"), values.integer("mamba_n_groups") * values.integer("mamba_d_state")
    inner, hidden, head_dim = values.integer("mamba_d_ssm"), sizes["hidden_size"], sizes["head_dim"]
    queries, pairs = sizes["num_attention_heads"] * head_dim, sizes["num_key_value_heads"] * head_dim
    widths = inner, inner, keys, keys, heads  # gates, values, keys, queries, steps
    factors = {
        "self_attn.q_proj": [(queries, before)],
        "self_attn.k_proj": [(pairs, before * values.number("key_multiplier", 1 / _MOST, _MOST, 1.0))],
        "self_attn.v_proj": [(pairs, before)],
        "self_attn.o_proj": [(hidden, after)],
        "mixer.in_proj": [
            (width, own_before * one) for width, one in zip(widths, numbers("ssm_multipliers", 5), strict=True)
        ],
        "mixer.out_proj": [(hidden, own_after)],
        "mlp.gate_proj": [(sizes["intermediate_size"], gate)],
        "mlp.down_proj": [(hidden, down)],
    }
    return tuple(
        RowFactors(part, tuple(runs)) for part, runs in factors.items() if any(factor != 1.0 for _, factor in runs)
    )


def residuals(values: Values, architecture: Architecture) -> Residual:
    """Return the input of the MLPs."""
    key = architecture.residual_key
    return architecture.residual if key is None or values.boolean(key) else "in turn"


def activation(values: Values, architecture: Architecture) -> Activation:
    """Return the activation of the MLPs."""
    key = architecture.activation_key
    name = None if key is None else values.get(key)
    known = _GATES if architecture.is_gated else _ACTIVATIONS
    if key is not None and name is not None and str(name) not in known:
        values.refuse(key, f"{' and '.join(map(repr, known))} are")
    return architecture.activation if name is None else known[str(name)]


def caps(values: Values, architecture: Architecture) -> dict[str, Any]:
    """Return the soft caps of scores and logits. They are refused if the architecture has none."""
    fields = {"attn_logit_softcapping": "scores_cap", "final_logit_softcapping": "logits_cap"}
    for name, field in fields.items():
        if values.get(name) is not None and not (architecture.soft_caps or architecture.own_cap == field):
            values.refuse(name, "only null is")
    return {field: values.number(name, 1e-3, _MOST) for name, field in fields.items() if values.get(name) is not None}


def rotary_dim(values: Values, group: Values, architecture: Architecture, head_dim: int) -> int:
    """Return how many numbers of a head are rotated. group: the rotary settings within the settings `values`."""
    place = next((one for one in (group, values) if one.get("partial_rotary_factor") is not None), None)
    # MiniMax's name for the setting
    if place is None and architecture.partial_rotary and values.get("rotary_dim") is not None:
        return _even_width(values, "rotary_dim", values.integer("rotary_dim"), head_dim)
    if place is None:
        return head_dim
    if not architecture.partial_rotary:
        if place.get("partial_rotary_factor") != 1:
            place.refuse("partial_rotary_factor", "only 1 is")
        return head_dim
    width = int(head_dim * place.number("partial_rotary_factor", 1e-3, 1.0))
    return _even_width(place, "partial_rotary_factor", width, head_dim)


def _even_width(values: Values, name: str, width: int, head_dim: int) -> int:
    if not 2 <= width <= head_dim or width % 2:
        values.fail(name, f"must rotate an even number of the {head_dim} numbers of a head")
    return width


def unrotated_layers(
    values: Values, architecture: Architecture, sizes: dict[str, Any], sliding: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the layers without rotary embedding. sliding: the layers with a window."""
    num_layers = sizes["num_hidden_layers"]
    match architecture.unrotated:
        case "none":
            return ()
        case "all":
            return tuple(range(num_layers))
        case "without rope_theta":
            rope = values.group("rope_parameters")
            return () if rope is not None and rope.get("rope_theta") is not None else tuple(range(num_layers))
        case "by layer_rope_theta":
            thetas = _layer_thetas(values, num_layers)
            return tuple(layer for layer, theta in enumerate(thetas) if theta == 0)
        case "full beside sliding":
            return unrotated_beside(sliding, num_layers) if values.get("sliding_window") is not None else ()
        case "by position_embedding_type":
            kind = values.get("position_embedding_type")
            if kind not in (None, "rope", "nope"):
                values.refuse("position_embedding_type", "'rope' and 'nope' are")
            return () if kind == "rope" else tuple(range(num_layers))
        case "no_rope_layers":
            flags = values.get("no_rope_layers")
            if flags is None or flags == []:
                return every(values.integer("no_rope_layer_interval"), num_layers)
            if not isinstance(flags, list) or len(flags) != num_layers or any(flag not in (0, 1) for flag in flags):
                values.fail("no_rope_layers", f"must be a list of {num_layers} zeros and ones, got {flags!r:.80}")
            return tuple(layer for layer, is_rotated in enumerate(flags) if not is_rotated)


def within_chunks(values: Values, architecture: Architecture) -> None:
    """Bound the context by the chunks within which tokens see each other, and by where scores grow with positions."""
    if architecture.sliding != "by chunks":
        return
    most = values.integer("max_position_embeddings")
    own = Values({**architecture.defaults, **values.values}, values.source)  # a GGUF file has none of these settings
    if own.get("attention_chunk_size") is not None:
        most = min(most, own.integer("attention_chunk_size"))
    if own.get("attn_temperature_tuning"):
        most = min(most, own.integer("floor_scale") - 1)
    values.values = {**values.values, values.key("max_position_embeddings"): most}


def layer_thetas(
    values: Values, architecture: Architecture, sliding: tuple[int, ...], rope: dict[str, Any]
) -> dict[str, Any]:
    """Return the thetas of layer_rope_theta by ModelConfig's names; empty without it. rope: what _rope() has read."""
    if architecture.unrotated != "by layer_rope_theta" or values.get("layer_rope_theta") is None:
        return {}
    thetas = _layer_thetas(values, values.integer("num_hidden_layers"))
    kinds = [
        {theta for layer, theta in enumerate(thetas) if theta and (layer in sliding) == has} for has in (False, True)
    ]
    if any(len(kind) > 1 for kind in kinds) or (rope["rope_scaling"] is not None and len(kinds[0] | kinds[1]) > 1):
        values.refuse("layer_rope_theta", "one theta, or one of layers with a window and one of the others, is")
    full, own = (kind.pop() if kind else None for kind in kinds)
    theta = full or own or rope["rope_theta"]
    return {"rope_theta": theta, "sliding_rope_theta": own if own not in (None, theta) else None}


def _layer_thetas(values: Values, num_layers: int) -> list[float]:
    """Return the theta of each layer; 0 = it is not rotated."""
    thetas = values.get("layer_rope_theta")
    if thetas is None:
        return [1.0] * num_layers
    if not isinstance(thetas, list) or len(thetas) != num_layers:
        values.fail("layer_rope_theta", f"must be a list of {num_layers} numbers, got {thetas!r:.80}")
    own = [Values({"layer_rope_theta": theta}, values.source) for theta in thetas]
    return [each.number("layer_rope_theta", 0.0, 1e12) for each in own]


def every(interval: int, num_layers: int) -> tuple[int, ...]:
    """Return every interval-th layer."""
    return tuple(range(interval - 1, num_layers, interval))


def unrotated_beside(sliding: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Return the layers that have no window."""
    return tuple(layer for layer in range(num_layers) if layer not in sliding)
