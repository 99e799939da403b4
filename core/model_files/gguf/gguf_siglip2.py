"""SigLIP 2's encoder (LFM2-VL) in a separate GGUF file (ipc/files/projector.py): its sizes and its tensors."""

import math
from collections.abc import Iterator
from pathlib import Path

from core.model_files.gguf.grid_blocks_gguf import block_sizes, tensor_name
from core.model_files.settings.siglip2_settings import siglip2_parts, tile_rows
from core.model_files.settings.values import GREY, Values
from core.model_files.tensors.weights import load_tensors
from core.models.grid_parts import GridParts, grid_shapes
from core.models.operations.stored_matrix import Weight
from ipc.files.gguf import read_gguf
from kernels.elements import Dtype

_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "patch_size": "patch_size",
    "scale_factor": "projector.scale_factor",
    "image_mean": "image_mean",
    "image_std": "image_std",
}
_NAMES = {
    "patches": "v.patch_embd",
    "positions": "v.position_embd",
    "norm": "v.post_ln",
    "merger.norm": "mm.input_norm",
    "merger.first": "mm.1",
    "merger.second": "mm.2",
    "attention_norm": "ln1",
    "mlp_norm": "ln2",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_out",
    "up": "ffn_up",
    "down": "ffn_down",
}


def read_gguf_siglip2(path: Path) -> GridParts:
    """Return the encoder in a file found by projector_of(). Errors: ModelFileError."""
    header = read_gguf(path)
    values = Values(header.metadata, str(path), {key: f"clip.vision.{rest}" for key, rest in _KEYS.items()})
    sizes, merge = block_sizes(values), values.integer("scale_factor", 2)
    shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
    side = math.isqrt(shapes.get("v.position_embd.weight", (0,))[-2:][0])
    nothing = Values({}, str(path))  # the processor's settings, which files do not have
    return siglip2_parts(
        **sizes,
        intermediate_size=values.integer("intermediate_size"),
        merge_size=merge,
        max_rows=tile_rows(nothing, sizes["patch_size"] * merge),
        norm_eps=float(f"{values.number('layer_norm_eps', 0.0, 1.0, 1e-6):.7g}"),
        positions_per_side=max(1, side),
        merger_size=shapes.get("mm.1.weight", (0,))[0],
        normalizes_merged="mm.input_norm.weight" in shapes,
        image_mean=values.colours("image_mean", GREY),
        image_std=values.colours("image_std", GREY),
        rescale_factor=1 / 255,
    )


def open_gguf_siglip2(path: Path, parts: GridParts, hidden_size: int, dtype: Dtype) -> Iterator[tuple[str, Weight]]:
    """Return an iterator over (name, weight) of grid_shapes(). Errors: ModelFileError, UnsupportedModelError."""
    shapes = grid_shapes(parts, hidden_size)
    return load_tensors(path, {name: tensor_name(name, _NAMES) for name in shapes}, shapes, None, dtype)
