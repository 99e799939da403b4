"""The weights of a model's vision encoder: from its folder, or made up."""

import math
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from core.model_files.gguf.gguf_grid import open_gguf_grid
from core.model_files.gguf.gguf_pooled import open_gguf_pooled
from core.model_files.gguf.gguf_vision import open_gguf_vision
from core.model_files.load_format import made_up
from core.model_files.tensors.weights import ended_name, load_tensors
from core.models.architectures.grid_architectures import grid_name
from core.models.architectures.vision_architectures import is_unused, vision_name
from core.models.grid_parts import GridParts, grid_shapes
from core.models.operations.stored_matrix import StoredMatrix, Weight
from core.models.vision_parts import VisionParts, vision_shapes
from ipc.files.safetensors import read_safetensors_folder
from kernels.elements import Dtype


def open_vision(
    source: Path, parts: VisionParts | GridParts, hidden_size: int, dtype: Dtype, *, is_made_up: bool
) -> Iterator[tuple[str, Weight]] | None:
    """Return an iterator over (name, weight) of the encoder's shapes; None if a folder has none of its weights.

    source: the model's folder, or its projector's file. Errors: ModelFileError, UnsupportedModelError.
    """
    is_grid = isinstance(parts, GridParts)
    shapes = grid_shapes(parts, hidden_size) if isinstance(parts, GridParts) else vision_shapes(parts, hidden_size)
    if is_made_up:
        flat = {name: shape if len(shape) < 3 else (shape[0], math.prod(shape[1:])) for name, shape in shapes.items()}
        return made_up(flat, dtype)
    if source.suffix == ".gguf":
        if isinstance(parts, GridParts) and parts.pooled is not None:
            return open_gguf_pooled(source, parts, hidden_size, dtype)
        if isinstance(parts, GridParts):
            return open_gguf_grid(source, parts, hidden_size, dtype)
        return open_gguf_vision(source, parts, hidden_size, dtype)
    files = [ended_name(name) for tensors in read_safetensors_folder(source).values() for name in tensors]
    theirs = {(grid_name if is_grid else vision_name)(name): name for name in files}
    if is_grid and not theirs.keys() - {None}:
        return None  # a checkpoint of the text model that kept the whole model's config.json
    names = {name: theirs.get(name, f"of the vision encoder's {name}") for name in shapes}
    is_others = (lambda name: grid_name(name) is None) if is_grid else is_unused
    unused = re.compile("|".join(re.escape(name) for name in files if is_others(name)))
    if isinstance(parts, GridParts) and parts.pooled is not None:
        shapes["patches.weight"] = parts.hidden_size, parts.patch_numbers
        return _by_colour(load_tensors(source, names, shapes, unused, dtype), dtype)
    return load_tensors(source, names, shapes, unused, dtype)


def _by_colour(weights: Iterator[tuple[str, Weight]], dtype: Dtype) -> Iterator[tuple[str, Weight]]:
    """Yield the weights; those of patches, which files have pixel by pixel, colour by colour."""
    for name, weight in weights:
        if name == "patches.weight":
            matrix = (StoredMatrix.of(weight) if isinstance(weight, np.ndarray) else weight).dense(dtype)
            weight = np.ascontiguousarray(matrix.reshape(len(matrix), -1, 3).transpose(0, 2, 1)).reshape(matrix.shape)
        yield name, weight
