"""Adapters as llama.cpp's convert_lora_to_gguf.py writes them: one .gguf file of general.type adapter."""

import math
import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from core.adapters.adapter import AdapterWeights, checked_weights
from ipc.errors import ModelFileError, UnsupportedModelError
from ipc.files.gguf import GgufTensor, read_gguf
from ipc.files.mapped_file import map_file
from kernels.dequantize import BLOCK_SIZES, dequantize
from kernels.elements import BFLOAT16, FLOAT16, FLOAT32, Numbers
from kernels.low_rank import LowRank

_NAME = re.compile(r"(?P<matrix>.+)\.weight\.(?P<part>lora_[ab])")
_PLAIN = {"F32": FLOAT32, "F16": FLOAT16, "BF16": BFLOAT16}


class GgufMatrix(NamedTuple):
    """A matrix of the model, by its name in GGUF files."""

    name: str  # ours
    num_heads: int = 0  # whose rows the file has in llama.cpp's rotary order; 0 = in transformers'


def read_gguf_adapter(
    path: Path, names: Mapping[str, GgufMatrix], shapes: Mapping[str, tuple[int, int]], max_rank: int
) -> AdapterWeights:
    """Return the adapter in a file; see checked_weights(). names: the model's matrices by their names in GGUF files.

    Errors: ModelFileError; UnsupportedModelError naming the tensor that this engine does not do.
    """
    header = read_gguf(path)
    kinds = header.metadata.get("general.type"), header.metadata.get("adapter.type")
    if kinds != ("adapter", "lora"):
        raise ModelFileError(f"{path}: general.type and adapter.type are {kinds}; expected an adapter of type lora")
    alpha = header.metadata.get("adapter.lora.alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise ModelFileError(f"{path}: adapter.lora.alpha must be a number; got {alpha!r:.80}")
    pairs: dict[str, dict[str, Numbers]] = {}
    with map_file(path) as file:
        for name, tensor in header.tensors.items():
            match = _NAME.fullmatch(name)
            if match is None or (matrix := names.get(match["matrix"])) is None:
                raise UnsupportedModelError(
                    f"{path}: tensor {name!r:.80} is not the lora_a or lora_b of a matrix that adapters may change"
                )
            pairs.setdefault(matrix.name, {})[match["part"]] = _numbers(file, tensor, matrix, path)
    matrices: dict[str, LowRank] = {}
    for name, pair in pairs.items():
        if len(pair) < 2:
            raise ModelFileError(f"{path}: {name} has {', '.join(pair)} alone")
        # Without alpha llama.cpp takes the product as it is.
        scale = float(alpha) / max(1, len(pair["lora_a"])) if alpha else 1.0
        matrices[name] = LowRank(pair["lora_a"], pair["lora_b"], scale)
    return checked_weights(path, matrices, shapes, max_rank)


def _numbers(file: mmap.mmap, tensor: GgufTensor, matrix: GgufMatrix, path: Path) -> Numbers:
    """Return a copy of a matrix, its rows in transformers' order."""
    if len(tensor.shape) != 2:
        raise ModelFileError(f"{path}: tensor {tensor.name!r:.80} has shape {list(tensor.shape)}; expected a matrix")
    if tensor.type not in BLOCK_SIZES:
        known = ", ".join(BLOCK_SIZES)
        raise UnsupportedModelError(f"{path}: tensor {tensor.name!r:.80} is {tensor.type}; supported are {known}")
    data = np.frombuffer(bytearray(file[tensor.offset : tensor.offset + tensor.num_bytes]), np.uint8)
    plain = _PLAIN.get(tensor.type)
    numbers = (dequantize(data, tensor.type) if plain is None else data.view(plain)).reshape(tensor.shape)
    rows, heads = len(numbers), matrix.num_heads
    if not heads or tensor.name.endswith("lora_a"):
        return numbers
    if rows % (2 * heads):
        raise ModelFileError(f"{path}: tensor {tensor.name!r:.80} has {rows} rows for {heads} heads")
    return np.ascontiguousarray(numbers.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2)).reshape(rows, -1)
