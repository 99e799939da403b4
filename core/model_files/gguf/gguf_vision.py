"""The vision encoder in a separate GGUF file (ipc/files/projector.py): its sizes, and the names of its tensors."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from core.model_files.settings.values import GREY, Values
from core.model_files.tensors.weights import load_tensors
from core.models.architectures.vision_architectures import GGUF_VISION
from core.models.operations.stored_matrix import Weight
from core.models.vision_parts import VisionParts, vision_shapes
from ipc.files.gguf import read_gguf
from ipc.files.projector import projector_kind
from kernels.elements import Dtype, to_floats

_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "image_size": "image_size",
    "patch_size": "patch_size",
    "scale_factor": "projector.scale_factor",
    "image_mean": "image_mean",
    "image_std": "image_std",
}
#: Patches of Gemma 3 per token in each direction, if its file does not state it; llama.cpp has the same number.
_GEMMA3_FACTOR = 4
_NAMES = {
    "patches": "v.patch_embd",
    "positions": "v.position_embd",
    "attention_norm": "ln1",
    "mlp_norm": "ln2",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_out",
    "up": "ffn_up",
    "down": "ffn_down",
    "attention_scale": "ls1",
    "mlp_scale": "ls2",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "norm": "v.post_ln",
}
_CONNECTORS = {
    "shuffle": {"connector": "mm.model.fc"},
    "mean and norm": {"connector": "mm.input_projection", "connector_norm": "mm.soft_emb_norm"},
    "norm and MLP": {
        "connector_norm": "mm.model.mlp.0",
        "connector": "mm.model.mlp.1",
        "connector_out": "mm.model.mlp.3",
    },
}


def read_gguf_vision(path: Path) -> VisionParts:
    """Return the vision encoder in a file found by projector_of(). Errors: ModelFileError."""
    header = read_gguf(path)
    metadata, tensors = header.metadata, header.tensors
    row = GGUF_VISION[projector_kind(metadata)]
    values = Values(metadata, str(path), {key: f"clip.vision.{rest}" for key, rest in _KEYS.items()})
    sizes: dict[str, Any] = {
        name: values.integer(name) for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    }
    heads, image, patch = (values.integer(name) for name in ("num_attention_heads", "image_size", "patch_size"))
    factor = values.integer("scale_factor", _GEMMA3_FACTOR if row.join == "mean and norm" else None)
    if sizes["hidden_size"] % heads:
        values.fail("hidden_size", f"must be a multiple of {values.key('num_attention_heads')}={heads}")
    if image % patch or (image // patch) % factor:
        values.fail("image_size", f"must be a multiple of the patch size times {factor}, {patch * factor}; got {image}")
    own: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh"}
    if row.join == "norm and MLP":  # InternVL's, of 300M or of 6B
        own = {
            "hidden_act": "gelu",
            "first_token": True,
            "branch_scales": True,
            "qkv_bias": "v.blk.0.attn_q.bias" in tensors,
            "rms_norms": "v.blk.0.ln1.bias" not in tensors,
            "qk_norms": "v.blk.0.attn_q_norm.weight" in tensors,
            "final_norm": False,
        }
    return VisionParts(
        **sizes,
        **own,
        num_attention_heads=heads,
        image_size=image,
        patch_size=patch,
        layer_norm_eps=float(f"{values.number('layer_norm_eps', 0.0, 1.0, 1e-6):.7g}"),
        scale_factor=factor,
        join=row.join,
        finds_positions=row.finds_positions,
        sees_whole=row.sees_whole,
        image_mean=values.colours("image_mean", GREY),
        image_std=values.colours("image_std", GREY),
        rescale_factor=1 / 255,
    )


def open_gguf_vision(path: Path, parts: VisionParts, hidden_size: int, dtype: Dtype) -> Iterator[tuple[str, Weight]]:
    """Return an iterator over (name, weight) of vision_shapes(). Errors: ModelFileError, UnsupportedModelError."""
    shapes, tensors = vision_shapes(parts, hidden_size), read_gguf(path).tensors
    up = tensors.get("v.blk.0.ffn_up.weight")
    is_swapped = up is not None and up.shape != shapes["layers.0.up.weight"]  # names used by the first converters
    names = {name: _file_name(name, parts, is_swapped=is_swapped) for name in shapes}
    weights = load_tensors(path, names, shapes, None, dtype)
    return _plain_norms(weights) if parts.join == "mean and norm" else weights


def _plain_norms(weights: Iterator[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
    """Yield the weights, without the 1 that the file adds to the connector's norm."""
    for name, weight in weights:
        if name == "connector_norm.weight" and isinstance(weight, np.ndarray):
            yield name, to_floats(weight) - np.float32(1)
        else:
            yield name, weight


def _file_name(name: str, parts: VisionParts, *, is_swapped: bool) -> str:
    if name == "first.weight":
        return "v.class_embd"
    names: Mapping[str, str] = _NAMES | _CONNECTORS[parts.join]
    if is_swapped:
        names = {**names, "up": _NAMES["down"], "down": _NAMES["up"]}
    stem, _, kind = name.rpartition(".")
    if stem.startswith("layers."):
        _, layer, part = stem.split(".")
        return f"v.blk.{layer}.{names[part]}.{kind}"
    return f"{names[stem]}.{kind}"
