"""Pixtral's encoder in a separate GGUF file (ipc/files/projector.py): its sizes and its tensors."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from core.model_files.gguf.grid_blocks_gguf import block_sizes, tensor_name
from core.model_files.settings.pixtral_settings import most_rows, pixtral_parts
from core.model_files.settings.values import Values
from core.model_files.tensors.weights import load_tensors
from core.models.config import ModelConfig
from core.models.grid_parts import GridParts, grid_shapes
from core.models.operations.stored_matrix import StoredMatrix, Weight
from ipc.files.gguf import read_gguf
from kernels.elements import Dtype

_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "patch_size": "patch_size",
    "spatial_merge_size": "spatial_merge_size",
    "image_size": "image_size",
    "image_mean": "image_mean",
    "image_std": "image_std",
}
_NAMES = {
    "patches": "v.patch_embd",
    "patch_norm": "v.pre_ln",
    "norm": "mm.input_norm",
    "merger.merge": "mm.patch_merger",
    "merger.first": "mm.1",
    "merger.second": "mm.2",
    "attention_norm": "ln1",
    "mlp_norm": "ln2",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_out",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def read_gguf_pixtral(path: Path, text: ModelConfig) -> GridParts:
    """Return the encoder in a file found by projector_of(). Without a merger of patches it is Pixtral-12B's.

    Errors: ModelFileError.
    """
    header = read_gguf(path)
    metadata, is_plain = header.metadata, "mm.patch_merger.weight" not in header.tensors
    values = Values(metadata, str(path), {key: f"clip.vision.{rest}" for key, rest in _KEYS.items()})
    sizes = block_sizes(values)
    merge = 1 if is_plain else values.integer("spatial_merge_size", 1)
    return pixtral_parts(
        merge_first=not is_plain,
        plain_merger=is_plain,
        **sizes,
        intermediate_size=values.integer("intermediate_size"),
        merge_size=merge,
        max_rows=most_rows(values.integer("image_size"), sizes["patch_size"] * merge),
        hidden_act="silu" if metadata.get("clip.use_silu") else "gelu",
        rope_theta=10_000.0,
        merger_eps=None if is_plain else text.rms_norm_eps,
        image_mean=values.colours("image_mean"),
        image_std=values.colours("image_std"),
        rescale_factor=1 / 255,
    )


def open_gguf_pixtral(path: Path, parts: GridParts, hidden_size: int, dtype: Dtype) -> Iterator[tuple[str, Weight]]:
    """Return an iterator over (name, weight) of grid_shapes(). Errors: ModelFileError, UnsupportedModelError."""
    shapes = grid_shapes(parts, hidden_size)
    weights = load_tensors(path, {name: _file_name(name) for name in shapes}, shapes, None, dtype)
    return _half_by_half(weights, parts.num_attention_heads, dtype)


def _half_by_half(weights: Iterator[tuple[str, Weight]], heads: int, dtype: Dtype) -> Iterator[tuple[str, Weight]]:
    """Yield the weights. In files the numbers of Q's and K's heads that are turned together follow each other; they are
    half a head apart here.
    """
    for name, weight in weights:
        if name.endswith((".q.weight", ".k.weight")):
            rows = (StoredMatrix.of(weight) if isinstance(weight, np.ndarray) else weight).dense(dtype)
            apart = rows.reshape(heads, -1, 2, rows.shape[1]).transpose(0, 2, 1, 3)
            weight = np.ascontiguousarray(apart).reshape(rows.shape)
        yield name, weight


def _file_name(name: str) -> str:
    if name == "break.weight":
        return "v.token_embd.img_break"
    return tensor_name(name, _NAMES)
