"""Settings of config.json by which layers of one model differ: heads, shared K and V, inputs of their own.

Errors of all functions: ModelFileError naming the key; UnsupportedModelError.
"""

from statistics import NormalDist
from typing import Any

from core.model_files.settings.values import Values
from core.models.architectures.by_name import ARCHITECTURES, Architecture
from core.models.config import HeadSizes, PerLayerParts, StreamParts

_OWN = "per_layer_config"
_HEADS = ("num_key_value_heads", "head_dim")
_TYPES = {row.model_type for row in ARCHITECTURES.values() if row.full_heads}


def refuse_own_settings(values: Values) -> None:
    """Refuse settings that single layers have (transformers 5.23 and newer), in any group of the file.

    Those of an architecture with heads of two sizes are read by full_heads().
    """
    groups = [
        Values(group, values.source, prefix=f"{name}.") for name, group in values.values.items() if type(group) is dict
    ]
    for group in (values, *groups):
        if group.get(_OWN) and group.get("model_type") not in _TYPES:
            group.refuse(_OWN, "all layers must have the settings of the whole model")


def of_text_alone(values: Values) -> None:
    """Leave out which tokens see each other where only those of an image do."""
    if values.get("use_bidirectional_attention") not in (None, False, "vision"):
        values.refuse("use_bidirectional_attention", "null and 'vision' are")
    values.values["use_bidirectional_attention"] = None


def layer_settings(
    values: Values, architecture: Architecture, sizes: dict[str, Any], sliding: tuple[int, ...]
) -> dict[str, Any]:
    """Return the differences of layers by ModelConfig's names. sliding: the layers with a window."""
    if architecture.has_streams:
        return stream_settings(values, architecture, sizes["num_hidden_layers"], sliding)
    if not architecture.full_heads:
        return {}
    fields = {
        "full_heads": full_heads(values, architecture, sizes, sliding),
        "full_keys_are_values": values.boolean("attention_k_eq_v"),
        "wide_mlps": values.boolean("use_double_wide_mlp"),
        "num_shared_layers": shared_layers(values, sizes["num_hidden_layers"], sliding),
        "value_norm": True,
        "layer_scales": True,
    }
    return fields | {"per_layer": per_layer_parts(values, architecture)}


def full_heads(
    values: Values, architecture: Architecture, sizes: dict[str, Any], sliding: tuple[int, ...]
) -> HeadSizes | None:
    """Return the heads of the layers without a window, if they are others than those with one.

    per_layer_config has the settings of single layers by their numbers; older files have one for all of these layers,
    global_head_dim, and num_global_key_value_heads (of Gemma 4 only if V is K).
    """
    plain = HeadSizes(*(sizes[name] for name in _HEADS))
    if _OWN not in values.values:
        kv_heads = plain.num_key_value_heads
        if values.boolean("attention_k_eq_v") or architecture.own_full_kv_heads:
            kv_heads = values.integer("num_global_key_value_heads", kv_heads)
        return checked_heads(values, HeadSizes(kv_heads, values.integer("global_head_dim", 512)), plain, sizes)
    own = _own_settings(values, sizes["num_hidden_layers"])
    others = {layer: HeadSizes(*(own[layer].integer(name, sizes[name]) for name in _HEADS)) for layer in own}
    every = [others.get(layer, plain) for layer in range(sizes["num_hidden_layers"])]
    full = [heads for layer, heads in enumerate(every) if layer not in sliding]
    if any(every[layer] != plain for layer in sliding) or len(set(full)) > 1:
        values.refuse(_OWN, "only heads of layers without a window may be others, and all of these alike, is")
    return checked_heads(values, full[0], plain, sizes) if full else None


def checked_heads(values: Values, full: HeadSizes, plain: HeadSizes, sizes: dict[str, Any]) -> HeadSizes | None:
    """Return the heads of layers without a window; None if they are those of the others."""
    if sizes["num_attention_heads"] % full.num_key_value_heads or full.head_dim % 2:
        heads = sizes["num_attention_heads"]
        values.fail(
            "num_attention_heads",
            f"must be a multiple of the KV heads, and heads be even; got {heads} heads, and {tuple(full)} of K and V",
        )
    return None if full == plain else full


def _own_settings(values: Values, num_layers: int) -> dict[int, Values]:
    """Return the settings of single layers. Their numbers may have zeros in front, as in "05"."""
    groups = values.group(_OWN)
    if groups is None:
        return {}
    own: dict[int, Values] = {}
    for key in groups.values:
        group = groups.group(key)
        if group is None or not key.isdecimal() or int(key) >= num_layers or int(key) in own:
            groups.fail(key, f"must be the settings of one of {num_layers} layers, by its number")
        for name in group.values:
            if name not in _HEADS:
                group.refuse(name, f"of single layers only {' and '.join(_HEADS)} are")
        own[int(key)] = group
    return own


def shared_layers(values: Values, num_layers: int, sliding: tuple[int, ...]) -> int:
    """Return how many of the last layers read K and V of others; one of each kind before them must have any."""
    count = values.integer("num_kv_shared_layers", 0)
    first = num_layers - count
    kinds, owners = ({layer in sliding for layer in range(end)} for end in (num_layers, max(first, 0)))
    if count and kinds != owners:
        values.fail("num_kv_shared_layers", f"must leave a layer with K and V of each kind; got {count}")
    return count


def alike_mlps(values: Values) -> None:
    """Replace a list of the sizes of MLPs, one for each layer, by their size."""
    sizes = values.get("intermediate_size")
    if isinstance(sizes, list) and sizes:
        if any(size != sizes[0] for size in sizes):
            values.refuse("intermediate_size", "all layers must be alike")
        values.values = {**values.values, values.key("intermediate_size"): sizes[0]}


def stream_settings(
    values: Values, architecture: Architecture, num_layers: int, sliding: tuple[int, ...]
) -> dict[str, Any]:
    """Return Gemma 3n's settings of layers by ModelConfig's names."""
    count = values.integer("altup_num_inputs")
    streams = StreamParts(
        count=count,
        active=values.integer("altup_active_idx"),
        scales_active=values.boolean("altup_correct_scale", True),
        rank=values.integer("laurel_rank"),
    )
    own = per_layer_parts(values, architecture, has_all=False)
    if own is None:
        values.refuse("hidden_size_per_layer_input", "layers with inputs of their own are")
    return {
        "streams": checked_streams(values, streams),
        "sparse_gates": _sparse_gates(values, num_layers),
        "num_shared_layers": shared_layers(values, num_layers, sliding),
        "value_norm": True,
        "per_layer": own,
    }


def checked_streams(values: Values, streams: StreamParts) -> StreamParts:
    """Return the streams. Errors: ModelFileError if the active one is none of them."""
    if streams.active >= streams.count:
        values.fail("altup_active_idx", f"must be one of {streams.count} streams, from 0 on; got {streams.active}")
    return streams


def _sparse_gates(values: Values, num_layers: int) -> tuple[float | None, ...]:
    """Return ModelConfig.sparse_gates from the shares of gates that are 0 if gates are normally distributed."""
    shares = values.get("activation_sparsity_pattern")
    if shares is None:
        first = 10 if num_layers > 10 else 0
        shares = [0.95] * first + [0.0] * (num_layers - first)
    is_list = isinstance(shares, list) and len(shares) == num_layers
    if not is_list or any(type(share) not in (int, float) or not 0 <= share < 1 for share in shares):
        what = f"must be a number from 0 to less than 1 for each of {num_layers} layers; got {shares!r:.80}"
        values.fail("activation_sparsity_pattern", what)
    found = tuple(NormalDist().inv_cdf(share) if share else None for share in shares)
    return found if any(one is not None for one in found) else ()


def per_layer_parts(values: Values, architecture: Architecture, *, has_all: bool = True) -> PerLayerParts | None:
    """Return the inputs of single layers; None without any. has_all: all tokens have such inputs."""
    if architecture.input_table and values.get("hidden_size_per_layer_input") in (None, 0):
        return None
    width, key = values.integer("hidden_size_per_layer_input"), architecture.activation_key
    if key is not None and values.get(key) not in (None, "gelu_pytorch_tanh"):
        values.refuse(key, "for layers with inputs of their own only 'gelu_pytorch_tanh' is")
    if not architecture.input_table:
        return PerLayerParts(width=width, vocab_size=0)
    vocab_size = values.integer("vocab_size_per_layer_input")
    if has_all and vocab_size < values.integer("vocab_size"):
        values.fail("vocab_size_per_layer_input", f"must be at least vocab_size; got {vocab_size}")
    given = values.integer("pad_token_id", 0)
    if given >= values.integer("vocab_size"):
        values.fail("pad_token_id", f"must be a token, less than vocab_size; got {given}")
    return PerLayerParts(width=width, vocab_size=vocab_size, given_id=given if has_all else 0)
