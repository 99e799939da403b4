"""The settings of routed MLPs in config.json, as ExpertParts.

Errors of all functions: ModelFileError naming the key; UnsupportedModelError.
"""

import msgspec

from core.model_files.settings.values import Values
from core.models.architectures.architecture import ExpertRow
from core.models.architectures.by_name import Architecture
from core.models.config import ExpertParts

#: Names in config.json of the number of experts, and of the number of experts per token.
_COUNTS = ("num_experts", "n_routed_experts", "moe_num_experts", "num_local_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k", "top_k_experts")
#: Settings of shared experts, which are refused where the architecture has none.
_SHARED = ("shared_expert_intermediate_size", "shared_intermediate_size", "n_shared_experts", "moe_num_shared_experts")


def experts(values: Values, architecture: Architecture) -> ExpertParts | None:
    """Return the properties of the routed MLPs, or None for a model without them."""
    row = architecture.experts
    count = next((name for name in _COUNTS if values.get(name) is not None), _COUNTS[0])
    if row is None or values.get(count) == 0 or (row.enabled_key and not values.boolean(row.enabled_key)):
        return None
    for name in ("clip_qkv", *_SHARED):
        if values.get(name) not in (None, 0) and name not in (row.shared_size_key, row.shared_count_key):
            values.refuse(name, "only null is")
    for name in _CHOSEN:
        _as_number(values, name)
    normalises = values.boolean("norm_topk_prob") if row.normalises is None else row.normalises
    chosen = next((name for name in _CHOSEN if values.get(name) is not None), _CHOSEN[0])
    parts = expert_parts(values, count, row.size_key, chosen, normalises=normalises)
    shared = shared_size(values, row, parts.intermediate_size)
    return msgspec.structs.replace(
        parts,
        dense_layers=_dense_layers(values, values.integer("num_hidden_layers")),
        has_biases=row.has_biases,
        shared_size=shared,
        has_shared_gate=row.has_shared_gate and shared > 0,
        is_sigmoid=row.is_sigmoid,
        has_correction=row.has_correction,
        added_to_sum=row.added_to_sum,
        has_scales=row.beside_dense,
        scales_inputs=row.scales_inputs,
        beside_dense=row.beside_dense,
        scaling=values.number("routed_scaling_factor", 1e-6, 1e6, 1.0) if row.scales else 1.0,
        **_groups(values, row, parts),
    )


def _as_number(values: Values, name: str) -> None:
    """Replace a list with one number per layer by the number."""
    listed = values.get(name)
    if isinstance(listed, list) and listed:
        if any(one != listed[0] for one in listed):
            values.refuse(name, "all layers must be alike")
        values.values[name] = listed[0]


def expert_parts(
    values: Values, count: str, size: str, chosen: str = "num_experts_per_tok", *, normalises: bool
) -> ExpertParts:
    """Return the properties of routed MLPs from the settings with these names, for all layers."""
    number, num_chosen = values.integer(count), values.integer(chosen)
    if num_chosen > number:
        values.fail(chosen, f"must be at most {values.key(count)}={number}, got {num_chosen}")
    return ExpertParts(
        num_experts=number, num_chosen=num_chosen, intermediate_size=values.integer(size), normalises=normalises
    )


def shared_size(values: Values, row: ExpertRow, size: int) -> int:
    """Return the size of the shared expert; 0 = there is none. size: of the others."""
    if row.shared_size_key is not None:
        return values.integer(row.shared_size_key) if values.get(row.shared_size_key) not in (None, 0) else 0
    if row.shared_count_key is None or values.get(row.shared_count_key) in (None, 0):
        return 0
    return size * values.integer(row.shared_count_key)


def _groups(values: Values, row: ExpertRow, parts: ExpertParts) -> dict[str, int]:
    method = values.get("topk_method")
    if row.groups == "group_limited_greedy" and method not in (None, "greedy", "group_limited_greedy"):
        values.refuse("topk_method", "'greedy' and 'group_limited_greedy' are")
    if row.groups == "none" or (row.groups == "group_limited_greedy" and method != row.groups):
        return {}
    return expert_groups(values, row.best_of_group, parts)


def expert_groups(values: Values, best_of_group: int, parts: ExpertParts) -> dict[str, int]:
    """Return the groups of experts from the settings n_group and topk_group, checked; empty without groups."""
    groups, chosen = (values.integer(name, 1) for name in ("n_group", "topk_group"))
    if groups == 1:
        return {}
    size = parts.num_experts // groups
    if parts.num_experts % groups or size < best_of_group:
        least = f" with at least {best_of_group} experts" if best_of_group > 1 else ""
        values.fail("n_group", f"must divide {parts.num_experts} experts into groups{least}; got {groups}")
    if chosen > groups or chosen * size < parts.num_chosen:
        values.fail(
            "topk_group", f"must leave {parts.num_chosen} experts or more, in at most {groups} groups: {chosen}"
        )
    return {"num_groups": groups, "num_chosen_groups": chosen, "best_of_group": best_of_group}


def _dense_layers(values: Values, num_layers: int) -> tuple[int, ...]:
    """Return the layers without a router.

    These are the layers in mlp_layer_types, or all but those in moe_layers; or those in mlp_only_layers, the first
    first_k_dense_replace or num_dense_layers ones, all but every decoder_sparse_step-th one, and those that Ernie's
    settings exclude.
    """
    kinds = values.get("mlp_layer_types")
    if kinds is not None:
        if (
            not isinstance(kinds, list)
            or len(kinds) != num_layers
            or not {"dense", "sparse"}.issuperset(map(str, kinds))
        ):
            values.fail("mlp_layer_types", f"must be a list of {num_layers} of 'dense' and 'sparse', got {kinds!r:.80}")
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    routed = values.get("moe_layers")
    if routed is not None:
        if not isinstance(routed, list) or any(type(layer) is not int for layer in routed):
            values.fail("moe_layers", f"must be a list of layers, got {routed!r:.80}")
        return tuple(layer for layer in range(num_layers) if layer not in routed)
    named = values.get("mlp_only_layers") or []
    if not isinstance(named, list) or any(type(layer) is not int for layer in named):
        values.fail("mlp_only_layers", f"must be a list of layers, got {named!r:.80}")
    if values.get("moe_layer_freq") not in (None, 1):
        values.refuse("moe_layer_freq", "only 1 is")
    names = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
    first = max(values.integer(name, 0) for name in names)
    end = values.get("moe_layer_end_index")
    last = num_layers - 1 if end in (None, -1) else values.integer("moe_layer_end_index")
    step = max(
        values.integer(name, 1) for name in ("decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step")
    )
    routed = [layer for layer in range(first, last + 1) if layer not in named and not (layer + 1) % step]
    return tuple(layer for layer in range(num_layers) if layer not in routed)
