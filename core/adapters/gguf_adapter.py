"""Adapters as written by llama.cpp's convert_lora_to_gguf.py: one .gguf file of general.type adapter."""

import math
import mmap
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from core.adapters.adapter import AdapterWeights, checked_weights
from core.adapters.file_matrix import FileMatrix, model_matrices
from ipc.errors import ModelFileError, UnsupportedModelError
from ipc.files.gguf import GgufTensor, read_gguf
from ipc.files.mapped_file import map_file
from kernels.dequantize import BLOCK_SIZES, dequantize
from kernels.elements import BFLOAT16, FLOAT16, FLOAT32, Numbers
from kernels.low_rank import LowRank

_NAME = re.compile(r"(?P<matrix>.+)\.weight\.(?P<part>lora_[ab])")
_PLAIN = {"F32": FLOAT32, "F16": FLOAT16, "BF16": BFLOAT16}


def read_gguf_adapter(
    path: Path, layers: Mapping[str, FileMatrix], shapes: Mapping[str, tuple[int, int]], max_rank: int
) -> AdapterWeights:
    """Return the adapter in a file; see checked_weights(). layers: those that adapters may change, by name.

    Errors: ModelFileError; UnsupportedModelError naming the unsupported tensor.
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
            if match is None or match["matrix"] not in layers:
                raise UnsupportedModelError(
                    f"{path}: tensor {name!r:.80} is not the lora_a or lora_b of a matrix that adapters may change"
                )
            pairs.setdefault(match["matrix"], {})[match["part"]] = _numbers(file, tensor, path)
    matrices: dict[str, LowRank] = {}
    for name, pair in pairs.items():
        if len(pair) < 2:
            raise ModelFileError(f"{path}: {name} has {', '.join(pair)} alone")
        # Without alpha llama.cpp uses the product unscaled.
        scale = float(alpha) / max(1, len(pair["lora_a"])) if alpha else 1.0
        matrices[name] = LowRank(pair["lora_a"], pair["lora_b"], scale)
    return checked_weights(path, model_matrices(path, matrices, layers), shapes, max_rank)


def _numbers(file: mmap.mmap, tensor: GgufTensor, path: Path) -> Numbers:
    """Return a copy of a matrix, because the file may change while requests use the adapter."""
    if len(tensor.shape) != 2:
        raise ModelFileError(f"{path}: tensor {tensor.name!r:.80} has shape {list(tensor.shape)}; expected a matrix")
    if tensor.type not in BLOCK_SIZES:
        known = ", ".join(BLOCK_SIZES)
        raise UnsupportedModelError(f"{path}: tensor {tensor.name!r:.80} is {tensor.type}; supported are {known}")
    data = np.frombuffer(bytearray(file[tensor.offset : tensor.offset + tensor.num_bytes]), np.uint8)
    plain = _PLAIN.get(tensor.type)
    return (dequantize(data, tensor.type) if plain is None else data.view(plain)).reshape(tensor.shape)
