"""The weights of a model's vision encoder: from its folder, or made up."""

import math
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from core.model_files.gguf.gguf_grid import open_gguf_grid
from core.model_files.gguf.gguf_pixtral import open_gguf_pixtral
from core.model_files.gguf.gguf_pooled import open_gguf_pooled
from core.model_files.gguf.gguf_siglip2 import open_gguf_siglip2
from core.model_files.gguf.gguf_vision import open_gguf_vision
from core.model_files.load_format import made_up
from core.model_files.tensors.weights import ended_name, load_tensors
from core.models.architectures.grid_architectures import grid_name
from core.models.architectures.vision_architectures import is_unused, vision_name
from core.models.grid_parts import GridParts, grid_shapes
from core.models.operations.stored_matrix import StoredMatrix, Weight
from core.models.vision_parts import VisionParts, vision_shapes
from ipc.errors import ModelFileError
from ipc.files.safetensors import read_safetensors_folder
from ipc.files.token_bytes import added_tokens
from kernels.elements import Dtype, to_floats

_BREAK = "[IMG_BREAK]"


def open_vision(
    source: Path, parts: VisionParts | GridParts, hidden_size: int, dtype: Dtype, *, is_made_up: bool
) -> Iterator[tuple[str, Weight]] | None:
    """Return an iterator over (name, weight) of the encoder's shapes; None if a folder has none of its weights, or
    lacks the tokenizer that it needs.

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
        if isinstance(parts, GridParts) and parts.breaks_rows:
            return open_gguf_pixtral(source, parts, hidden_size, dtype)
        if isinstance(parts, GridParts) and parts.averages_positions:
            return open_gguf_siglip2(source, parts, hidden_size, dtype)
        if isinstance(parts, GridParts):
            return open_gguf_grid(source, parts, hidden_size, dtype)
        return open_gguf_vision(source, parts, hidden_size, dtype)
    files = [ended_name(name) for tensors in read_safetensors_folder(source).values() for name in tensors]
    theirs = {(grid_name if is_grid else vision_name)(name): name for name in files}
    if is_grid and not theirs.keys() - {None}:
        return None  # a checkpoint of the text model that kept the whole model's config.json
    ends_rows = is_grid and shapes.pop("break.weight", None) is not None
    if ends_rows and not (source / "tokenizer.json").is_file():
        return None  # it is not known which token ends a row, and clients do not know the mark of an image
    names = {name: theirs.get(name, f"of the vision encoder's {name}") for name in shapes}
    is_others = (lambda name: grid_name(name) is None) if is_grid else is_unused
    unused = re.compile("|".join(re.escape(name) for name in files if is_others(name)))
    if isinstance(parts, GridParts) and parts.colours_last:
        shapes["patches.weight"] = parts.hidden_size, parts.patch_numbers
        return _by_colour(load_tensors(source, names, shapes, unused, dtype), dtype)
    weights = load_tensors(source, names, shapes, unused, dtype)
    return chain(weights, _break_row(source, hidden_size, dtype)) if ends_rows else weights


def _break_row(folder: Path, hidden_size: int, dtype: Dtype) -> Iterator[tuple[str, Weight]]:
    """Yield the text model's embedding of the token that ends a row of an image. Errors: ModelFileError."""
    token = added_tokens((folder / "tokenizer.json").read_bytes()).get(_BREAK)
    found = [(name, one.shape) for tensors in read_safetensors_folder(folder).values() for name, one in tensors.items()]
    table = next(((name, shape) for name, shape in found if name.endswith("embed_tokens.weight")), None)
    if token is None or table is None or len(table[1]) != 2 or table[1][1] != hidden_size or token >= table[1][0]:
        raise ModelFileError(
            f"{folder}: the token {_BREAK}, which ends a row of an image, has no embedding: it is {token} in "
            f"tokenizer.json, and the embeddings are {table}"
        )
    name, shape = table
    ((_, weight),) = load_tensors(folder, {"table": name}, {"table": shape}, re.compile(".*", re.DOTALL), dtype)
    rows = StoredMatrix.of(weight) if isinstance(weight, np.ndarray) else weight
    yield "break.weight", to_floats(rows.rows(token, token + 1).dense(dtype))[0].copy()


def _by_colour(weights: Iterator[tuple[str, Weight]], dtype: Dtype) -> Iterator[tuple[str, Weight]]:
    """Yield the weights; those of patches, which files have pixel by pixel, colour by colour."""
    for name, weight in weights:
        if name == "patches.weight":
            matrix = (StoredMatrix.of(weight) if isinstance(weight, np.ndarray) else weight).dense(dtype)
            weight = np.ascontiguousarray(matrix.reshape(len(matrix), -1, 3).transpose(0, 2, 1)).reshape(matrix.shape)
        yield name, weight
