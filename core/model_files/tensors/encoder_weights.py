"""The weights of encoders: their names and shapes, and their names in files."""

import re
from collections.abc import Mapping
from typing import TypeVar

from core.models.architectures.encoder_architectures import ENCODER_FORMS, EncoderArchitecture
from core.models.config import ModelConfig
from core.models.encoder import head_shapes

_Stored = TypeVar("_Stored")

#: Tensors that a checkpoint may have but an encoder does not use: position numbers, and heads for other tasks.
_UNUSED = re.compile(r"embeddings\.(position|token_type)_ids|(pooler|cls|lm_head|head|decoder)\..*")


def encoder_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight by name, in the order of use; matrices are [out, in]."""
    parts, hidden, inner = config.encoder, config.hidden_size, config.intermediate_size
    assert parts is not None, config.architecture
    tables = {"words": config.vocab_size, "positions": parts.num_positions, "kinds": parts.num_kinds}
    shapes: dict[str, tuple[int, ...]] = {
        f"embeddings.{name}.weight": (rows, hidden) for name, rows in tables.items() if rows
    }
    attention = {"qkv": 3 * hidden} if parts.has_fused_qkv else dict.fromkeys("qkv", hidden)
    products = {name: (rows, hidden) for name, rows in attention.items()}
    products["o"] = (hidden, hidden)
    if parts.is_gated and not parts.has_fused_gate:
        products["gate"] = (inner, hidden)
    is_double = parts.is_gated and parts.has_fused_gate
    products |= {"up": (inner * (2 if is_double else 1), hidden), "down": (hidden, inner)}
    names = ("attention_out_norm" if parts.norms_follow else "attention_norm", "mlp_norm")
    vectors = {"embeddings.norm": hidden}
    for layer in range(config.num_hidden_layers):
        for name, shape in products.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
            if parts.has_biases and parts.products_have_biases:
                shapes[f"layers.{layer}.{name}.bias"] = shape[:1]
        vectors |= {f"layers.{layer}.{name}": hidden for name in names if layer or name != "attention_norm"}
    if not parts.norms_follow:
        vectors["final_norm"] = hidden
    for name, size in vectors.items():
        shapes |= {f"{name}.{kind}": (size,) for kind in (("weight", "bias") if parts.has_biases else ("weight",))}
    return shapes | head_shapes(config)


def with_our_names(found: Mapping[str, _Stored], config: ModelConfig) -> dict[str, _Stored]:
    """Return a checkpoint's tensors under our names, without unused ones. Unknown ones keep their names.

    If a checkpoint has something after its layers, the layers' names have a prefix. The oldest checkpoints call a
    norm's weight and bias gamma and beta.
    """
    row, _ = ENCODER_FORMS[config.architecture]
    ours = {theirs: name for name, theirs in _file_names(row, config).items()}
    tensors: dict[str, _Stored] = {}
    for name, tensor in found.items():
        plain = name.removeprefix(row.prefix)
        plain = plain.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        stem, _, kind = plain.rpartition(".")
        if stem in ours:
            tensors[f"{ours[stem]}.{kind}"] = tensor
        elif not _UNUSED.fullmatch(plain):
            tensors[name] = tensor
    return tensors


def encoder_gguf_name(name: str, config: ModelConfig) -> str:
    """Return the name in GGUF files for one of encoder_shapes()."""
    row, _ = ENCODER_FORMS[config.architecture]
    stem, _, kind = name.rpartition(".")
    layer = stem.split(".")[1] if stem.startswith("layers.") else ""
    theirs = row.gguf_weights[stem.replace(f"layers.{layer}.", "layers.{}.", 1) if layer else stem]
    return f"{theirs.format(layer)}.{kind}"


def _file_names(row: EncoderArchitecture, config: ModelConfig) -> dict[str, str]:
    """Return the file's name stem for each weight, by our name."""
    names: dict[str, str] = dict(row.head_weights) if config.num_labels else {}
    for name, theirs in row.weights.items():
        layers = range(config.num_hidden_layers) if "{}" in name else range(1)
        names |= {name.format(layer): theirs.format(layer) for layer in layers}
    return names
