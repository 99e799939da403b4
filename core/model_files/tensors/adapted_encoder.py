"""The linear layers and tables of encoders that adapters may change, by their names in PEFT's files."""

import numpy as np

from core.adapters.file_matrix import FileMatrix, FilePart
from core.models.architectures.encoder_architectures import ENCODER_FORMS
from core.models.config import ModelConfig

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
#: Our stem of a weight within a layer -> the matrices in it, of equal size.
_OF_LAYER: dict[str, tuple[str, ...]] = {
    **{stem: (name,) for stem, name in zip("qkv", _QKV, strict=True)},
    "qkv": _QKV,
    "o": ("self_attn.o_proj",),
    "gate": ("mlp.gate_proj",),
    "up": ("mlp.up_proj",),
    "down": ("mlp.down_proj",),
}
#: A layer that only classifiers compute. What an adapter adds to it changes nothing in other models; in a classifier it
#: is refused.
_POOLER = "pooler.dense"


def encoder_peft_layers(config: ModelConfig) -> dict[str, FileMatrix]:
    """Return the layers, with and without the prefix of a model with something after its layers."""
    row, _ = ENCODER_FORMS[config.architecture]
    parts = config.encoder
    assert parts is not None, config.architecture
    found: dict[str, FileMatrix] = {} if config.num_labels else {_POOLER: FileMatrix(())}
    for stem, theirs in (row.modules or row.weights).items():
        kind = stem.removeprefix("layers.{}.")
        if stem in ("embeddings.words", "embeddings.kinds"):
            found[theirs] = FileMatrix((FilePart(stem),))
        elif kind in _OF_LAYER:
            is_double = kind == "up" and parts.is_gated and parts.has_fused_gate
            names = ("mlp.gate_proj", "mlp.up_proj") if is_double else _OF_LAYER[kind]
            size = config.intermediate_size if is_double else config.hidden_size
            for layer in range(config.num_hidden_layers):
                found[theirs.format(layer)] = _matrix([f"model.layers.{layer}.{name}" for name in names], size)
    return found | {row.prefix + name: matrix for name, matrix in found.items()}


def _matrix(names: list[str], size: int) -> FileMatrix:
    """Return a layer made of these matrices. size: rows of each, if there are several."""
    if len(names) == 1:
        return FileMatrix((FilePart(names[0]),))
    rows = np.split(np.arange(len(names) * size), len(names))
    return FileMatrix(tuple(FilePart(name, own) for name, own in zip(names, rows, strict=True)), len(names) * size)
