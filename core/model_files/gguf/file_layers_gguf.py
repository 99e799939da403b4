"""Layers of a GGUF file that are not ours: halves of them (Nemotron-H), or two mixers and an MLP (Falcon-H1).

Errors of all functions: ModelFileError naming the key; UnsupportedModelError.
"""

from typing import Any

from core.model_files.settings.file_layers import our_layers
from core.model_files.settings.values import Values
from core.models.architectures.by_name import Architecture
from core.models.config import XIELU_NAMES
from ipc.files.gguf import GgufHeader


def gguf_file_layers(values: Values, header: GgufHeader, architecture: Architecture) -> tuple[tuple[int, int], ...]:
    """Return ModelConfig.file_layers, and set the number of our layers, and the number of KV heads of each."""
    if architecture.file_layers == "whole":
        return ()
    heads = values.get("num_key_value_heads")
    found: dict[str, Any] = {"num_hidden_layers": values.integer("num_hidden_layers")}
    changed = {}
    if architecture.file_layers == "halves":
        count, sizes = found["num_hidden_layers"], values.get("intermediate_size")
        for name, listed in (("num_key_value_heads", heads), ("intermediate_size", sizes)):
            if not isinstance(listed, list) or len(listed) != count or any(type(one) is not int for one in listed):
                values.fail(name, f"must be a list of {count} numbers, one for each layer; got {listed!r:.80}")
        found["layers_block_type"] = [_kind(header, layer, heads[layer], sizes[layer]) for layer in range(count)]
        heads, changed = max(heads), {values.key("intermediate_size"): max(sizes)}
    own = Values(found, values.source)
    layers = our_layers(own, architecture)
    kinds = own.values["layer_types"]
    changed[values.key("num_hidden_layers")] = len(kinds)
    changed[values.key("num_key_value_heads")] = [0 if kind == "mamba" else heads for kind in kinds]
    values.values = {**values.values, **changed}
    return layers


def _kind(header: GgufHeader, layer: int, heads: int, size: int) -> str:
    """Return the kind of a file's layer, by its numbers of KV heads and of the MLP: one of them is 0, or both."""
    if heads:
        return "full_attention"
    return "mamba" if not size else "moe" if f"blk.{layer}.ffn_gate_inp.weight" in header.tensors else "mlp"


def dense_layers(
    header: GgufHeader, architecture: Architecture, file_layers: tuple[tuple[int, int], ...], num_layers: int
) -> tuple[int, ...]:
    """Return the layers whose MLP has no router, and those without an MLP."""
    numbers = [mlp for _, mlp in file_layers] if file_layers else range(num_layers)
    part = "ffn_gate" if architecture.is_gated else "ffn_up"
    return tuple(layer for layer, mlp in enumerate(numbers) if mlp < 0 or f"blk.{mlp}.{part}.weight" in header.tensors)


def gguf_xielu(values: Values, architecture: Architecture, num_layers: int) -> tuple[tuple[float, ...], ...]:
    """Return ModelConfig.xielu: the file's keys hold one number for each layer, or one for all."""
    if architecture.activation != "xielu":
        return ()
    columns = []
    for name in XIELU_NAMES:
        listed = values.values.get(f"xielu.{name}")
        numbers: list[Any] = listed if isinstance(listed, list) else [listed] * num_layers
        if len(numbers) != num_layers or any(type(one) not in (int, float) for one in numbers):
            values.fail(f"xielu.{name}", f"must be {num_layers} numbers, one for each layer; got {listed!r:.80}")
        columns.append([float(one) for one in numbers])
    return tuple(zip(*columns, strict=True))
