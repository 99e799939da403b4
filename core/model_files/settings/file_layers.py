"""Models whose files have other layers than ours, which are a mixer and perhaps an MLP.

If a layer of the file is a mixer or an MLP (Nemotron-H), an MLP belongs to the mixer before it. Two mixers may follow
each other: then the first one's layer has no MLP. If a layer of the file has two mixers that read the same (Falcon-H1),
it becomes two layers, the first of which has no MLP.
"""

from core.model_files.settings.values import Values
from core.models.architectures.architecture import Architecture

#: Names of the kinds of layers in layers_block_type, and letters in hybrid_override_pattern -> ours.
_KINDS = {
    **dict.fromkeys(("M", "mamba", "linear_attention"), "mamba"),
    **dict.fromkeys(("*", "attention", "full_attention"), "full_attention"),
    **dict.fromkeys(("-", "mlp"), "dense"),
    **dict.fromkeys(("E", "moe"), "sparse"),
}


def our_layers(values: Values, architecture: Architecture) -> tuple[tuple[int, int], ...]:
    """Return ModelConfig.file_layers, and set the kinds and the number of our layers, if they are others.

    Errors: ModelFileError naming the key; UnsupportedModelError.
    """
    match architecture.file_layers:
        case "halves":
            return _joined(values)
        case "two mixers":
            return _divided(values)
        case _:
            return ()


def _divided(values: Values) -> tuple[tuple[int, int], ...]:
    count = values.integer("num_hidden_layers")
    values.values = {
        **values.values,
        values.key("num_hidden_layers"): 2 * count,
        "layer_types": ["mamba", "full_attention"] * count,
    }
    return tuple((layer, mlp) for layer in range(count) for mlp in (-1, layer))


def _joined(values: Values) -> tuple[tuple[int, int], ...]:
    key = "layers_block_type" if values.get("layers_block_type") is not None else "hybrid_override_pattern"
    names = values.get(key)
    if not isinstance(names, str if key == "hybrid_override_pattern" else list) or not 0 < len(names) <= 2**12:
        values.fail(key, f"must have the kind of each layer, got {names!r:.80}")
    if any(str(name) not in _KINDS for name in names):
        values.refuse(key, f"{', '.join(map(repr, _KINDS))} are")
    mixers: list[str] = []
    mlps: list[str] = []
    places: list[tuple[int, int]] = []
    for number, kind in enumerate(_KINDS[str(name)] for name in names):
        if kind in ("mamba", "full_attention"):
            mixers.append(kind)
            mlps.append("dense")
            places.append((number, -1))
            continue
        if not places or places[-1][1] >= 0:
            values.refuse(key, "an MLP after a layer of Mamba-2 or attention is")
        mlps[-1], places[-1] = kind, (places[-1][0], number)
    changed = {"layer_types": mixers, "mlp_layer_types": mlps, "num_hidden_layers": len(mixers)}
    if "sparse" not in mlps:
        changed["n_routed_experts"] = 0
    dropped = ("layers_block_type", "n_shared_experts")  # the size of shared experts is that of all together
    values.values = {name: value for name, value in values.values.items() if name not in dropped} | changed
    return tuple(places)
