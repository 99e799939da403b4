"""The encoder for images of any size in a separate GGUF file (ipc/files/projector.py): its sizes and its tensors."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from core.model_files.gguf.gguf_pixtral import read_gguf_pixtral
from core.model_files.gguf.gguf_pooled import read_gguf_pooled
from core.model_files.gguf.gguf_siglip2 import read_gguf_siglip2
from core.model_files.gguf.grid_blocks_gguf import block_sizes, tensor_name
from core.model_files.settings.grid_settings import max_rows, rope_axes
from core.model_files.settings.values import Values
from core.model_files.tensors.weights import load_tensors
from core.models.architectures.grid_architectures import GRID_ROWS, GridArchitecture
from core.models.config import ModelConfig
from core.models.grid_parts import GridParts, grid_shapes
from core.models.operations.stored_matrix import StoredMatrix, Weight
from ipc.files.gguf import read_gguf
from ipc.files.projector import pixel_bounds, projector_kind
from kernels.elements import Dtype, to_floats

_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "patch_size": "patch_size",
    "spatial_merge_size": "spatial_merge_size",
    "window_size": "window_size",
    "full_attention_interval": "n_wa_pattern",
    "deepstack": "is_deepstack_layers",
    "image_mean": "image_mean",
    "image_std": "image_std",
}
_NAMES = {
    "patches": "v.patch_embd",
    "positions": "v.position_embd",
    "norm": "v.post_ln",
    "merger.first": "mm.0",
    "merger.second": "mm.2",
    "attention_norm": "ln1",
    "mlp_norm": "ln2",
    "qkv": "attn_qkv",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_out",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "first": "fc1",
    "second": "fc2",
}


def grid_row(path: Path) -> GridArchitecture | None:
    """Return the first architecture with the projector in this file; None if its images have one size."""
    kind = projector_kind(read_gguf(path).metadata)
    return next((row for row in GRID_ROWS if row.gguf == kind), None)


def with_grid(
    config: ModelConfig, path: Path, projector: Path, row: GridArchitecture
) -> tuple[GridParts, tuple[int, ...] | None]:
    """Return the encoder in `projector`, and rope_axes of the text model in `path`. Errors: ModelFileError."""
    if row.form == "pooled":
        return read_gguf_pooled(projector, config), None
    if row.form == "pixtral":
        return read_gguf_pixtral(projector, config), None
    if row.form == "siglip2":
        return read_gguf_siglip2(projector), None
    metadata = read_gguf(path).metadata
    sections = metadata.get(f"{metadata.get('general.architecture')}.rope.dimension_sections")
    rope = {"mrope_section": sections[:3] if isinstance(sections, list) else None}
    return _read(projector, row), rope_axes(rope, row, config, Values(metadata, str(path)))


def _read(path: Path, row: GridArchitecture) -> GridParts:
    header = read_gguf(path)
    values = Values(header.metadata, str(path), {key: f"clip.vision.{rest}" for key, rest in _KEYS.items()})
    sizes = block_sizes(values)
    width, layers = sizes["hidden_size"], sizes["num_hidden_layers"]
    merge = values.integer("spatial_merge_size", row.defaults["spatial_merge_size"])
    unit = sizes["patch_size"] * merge
    up, table = header.tensors.get("v.blk.0.ffn_up.weight"), header.tensors.get("v.position_embd.weight")
    inner = 1 if up is None else up.shape[0] if up.shape[-1] == width else up.shape[-1]
    side = 0 if table is None else math.isqrt(table.shape[0])
    every = values.integer("full_attention_interval", layers + 1) if row.windows else 1
    flags = values.get("deepstack") if row.deep else None
    if flags is not None and (not isinstance(flags, list) or len(flags) != layers):
        values.fail("deepstack", f"must be a list of {layers} values, got {flags!r:.80}")
    return GridParts(
        **sizes,
        intermediate_size=inner,
        frames=2,
        merge_size=merge,
        max_rows=max_rows(pixel_bounds(header.metadata)[1], unit),
        norm_eps=1e-6,
        is_centred=row.is_centred,
        hidden_act=row.defaults["hidden_act"],
        is_gated=row.is_gated,
        patch_bias=row.patch_bias,
        rope_theta=10_000.0,
        positions_per_side=side if row.positions else 0,
        window=max(1, values.integer("window_size", row.defaults["window_size"]) // unit) if row.windows else 0,
        full_layers=tuple(range(every - 1, layers, every)) if row.windows else (),
        deep_layers=tuple(np.flatnonzero(flags).tolist()) if flags else (),
        image_mean=values.colours("image_mean"),
        image_std=values.colours("image_std"),
        rescale_factor=1 / 255,
    )


def open_gguf_grid(path: Path, parts: GridParts, hidden_size: int, dtype: Dtype) -> Iterator[tuple[str, Weight]]:
    """Return an iterator over (name, weight) of grid_shapes(). Errors: ModelFileError, UnsupportedModelError."""
    tensors = read_gguf(path).tensors
    is_fused = "v.blk.0.attn_qkv.weight" in tensors
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in grid_shapes(parts, hidden_size).items():
        stem, _, kind = name.rpartition(".")
        if name == "patches.weight":
            shapes |= {f"patches.{frame}": (shape[0], shape[1], *shape[3:]) for frame in range(parts.frames)}
        elif stem.endswith(".qkv") and not is_fused:
            shapes |= {f"{stem[:-3]}{part}.{kind}": (shape[0] // 3, *shape[1:]) for part in "qkv"}
        else:
            shapes[name] = shape
    up = tensors.get("v.blk.0.ffn_up.weight")
    is_swapped = up is not None and up.shape != shapes["layers.0.up.weight"]  # names used by the first converters
    names = {name: _file_name(name, parts, is_swapped=is_swapped) for name in shapes}
    return _joined(load_tensors(path, names, shapes, None, dtype), parts, dtype)


def _joined(weights: Iterator[tuple[str, Weight]], parts: GridParts, dtype: Dtype) -> Iterator[tuple[str, Weight]]:
    """Yield the weights, with the frames of patches, and Q, K and V, as one each."""
    waiting: dict[str, Weight] = {}
    for name, weight in weights:
        stem, _, kind = name.rpartition(".")
        if stem == "patches" and kind.isdigit():
            waiting[kind] = weight
            if len(waiting) == parts.frames:
                frames = [_matrix(one).dense(dtype) for one in waiting.values()]
                cut = [frame.reshape(parts.hidden_size, 3, -1) for frame in frames]
                yield "patches.weight", np.stack(cut, 2).reshape(parts.hidden_size, -1)
                waiting.clear()
        elif stem.startswith("layers.") and stem.rpartition(".")[2] in "qkv" and not stem.endswith(".qkv"):
            waiting[name] = weight
            if len(waiting) == 3:
                ours, every = f"{stem[:-1]}qkv.{kind}", list(waiting.values())
                waiting.clear()
                if kind == "weight":
                    yield ours, StoredMatrix([part for one in every for part in _matrix(one).parts])
                else:
                    yield ours, np.concatenate([to_floats(one) for one in every if isinstance(one, np.ndarray)])
        else:
            yield name, weight


def _matrix(weight: Weight) -> StoredMatrix:
    return StoredMatrix.of(weight) if isinstance(weight, np.ndarray) else weight


def _file_name(name: str, parts: GridParts, *, is_swapped: bool) -> str:
    names = {**_NAMES, "up": _NAMES["down"], "down": _NAMES["up"]} if is_swapped else _NAMES
    stem, _, kind = name.rpartition(".")
    if stem == "patches" and kind.isdigit():
        return "v.patch_embd.weight" if kind == "0" else f"v.patch_embd.weight.{kind}"
    if stem.startswith("deep."):
        _, index, part = stem.split(".")
        return f"v.deepstack.{parts.deep_layers[int(index)]}.{names[part] if part != 'norm' else part}.{kind}"
    return tensor_name(name, names)
