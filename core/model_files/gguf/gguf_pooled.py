"""Gemma 4's vision encoder in a separate GGUF file (ipc/files/projector.py): its sizes and its tensors."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.model_files.settings.pooled_settings import check_pooled
from core.model_files.settings.values import Values
from core.model_files.tensors.weights import load_tensors
from core.models.config import ModelConfig
from core.models.grid_parts import GridParts, PooledParts, grid_shapes
from core.models.operations.stored_matrix import Weight
from ipc.files.gguf import read_gguf
from ipc.files.projector import POOLED_ROWS, pooling_size
from kernels.elements import Dtype

_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "patch_size": "patch_size",
    "layer_norm_eps": "attention.layer_norm_epsilon",
}
_NAMES = {
    "patches": "v.patch_embd",
    "positions": "v.position_embd",
    "projection": "mm.input_projection",
    "input_layernorm": "ln1",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_out",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_STANDARD = {"standard.bias": "v.std_bias", "standard.weight": "v.std_scale"}
_AUDIO = re.compile(r"a\..*|mm\.a\..*")  # the encoder of audio, which is not read


def read_gguf_pooled(path: Path, text: ModelConfig) -> GridParts:
    """Return the encoder in a file found by projector_of(). Errors: ModelFileError, UnsupportedModelError.

    Files do not say whether an image's tokens see each other. They do in the published models without inputs of single
    layers.
    """
    header = read_gguf(path)
    values = Values(header.metadata, str(path), {key: f"clip.vision.{rest}" for key, rest in _KEYS.items()})
    shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
    head_dim = shapes.get("v.blk.0.attn_q_norm.weight", (0,))[0]
    rows = shapes.get("v.blk.0.attn_k.weight", (0,))[0]
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size")
    sizes: dict[str, Any] = {name: values.integer(name) for name in names}
    parts = GridParts(
        **sizes,
        frames=1,
        merge_size=pooling_size(header.metadata),
        max_rows=POOLED_ROWS,
        norm_eps=float(f"{values.number('layer_norm_eps', 0.0, 1.0, 1e-6):.7g}"),
        is_centred=False,
        hidden_act="gelu_pytorch_tanh",
        is_gated=True,
        patch_bias=False,
        colours_last=True,
        rope_theta=100.0,
        pooled=PooledParts(
            num_key_value_heads=max(1, rows // max(1, head_dim)),
            head_dim=head_dim,
            positions_per_axis=shapes.get("v.position_embd.weight", (0, 0))[1],
            clips="v.blk.0.attn_q.input_min" in shapes,
            standardizes="v.std_bias" in shapes,
        ),
        sees_whole=text.per_layer is None,
        turns_by_place=False,
        image_mean=(0.5, 0.5, 0.5),
        image_std=(0.5, 0.5, 0.5),
        rescale_factor=1 / 255,
    )
    check_pooled(parts, values, text)
    return parts


def open_gguf_pooled(path: Path, parts: GridParts, hidden_size: int, dtype: Dtype) -> Iterator[tuple[str, Weight]]:
    """Return an iterator over (name, weight) of grid_shapes(). Errors: ModelFileError, UnsupportedModelError."""
    shapes = grid_shapes(parts, hidden_size)
    return load_tensors(path, {name: _file_name(name) for name in shapes}, shapes, _AUDIO, dtype)


def _file_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if name in _STANDARD:
        return _STANDARD[name]
    if stem.startswith("layers."):
        _, layer, part = stem.split(".", 2)
        return f"v.blk.{layer}.{_NAMES[part]}.{kind}"
    return f"{_NAMES[stem]}.{kind}"
