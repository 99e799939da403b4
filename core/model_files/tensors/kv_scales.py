"""Scales of 8-bit floats that some quantized checkpoints have: those of a layer's KV cache, and single ones."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from core.model_files.tensors.stored_tensor import StoredTensor
from ipc.errors import ModelFileError
from ipc.files.mapped_file import map_file
from ipc.files.safetensors import read_safetensors, read_safetensors_folder
from kernels.dequantize import dequantize
from kernels.memory.kv_cache import Scales

#: As compressed-tensors and Model Optimizer name them.
_NAME = re.compile(r"(?:.+\.)?layers\.(\d{1,6})\.self_attn\.(?:[kv]_proj\.)?([kv])_scale")


def read_kv_scales(path: Path, layers: Sequence[int]) -> tuple[Scales, ...]:
    """Return what K and V of these layers are divided by before they are stored; () if the model has no such scales.

    path: a folder or file in safetensors' format; a GGUF file has none. Errors: ModelFileError naming a scale that is
    missing, or is not one positive number.
    """
    if path.suffix == ".gguf":
        return ()
    files = read_safetensors_folder(path) if path.is_dir() else {path: read_safetensors(path)}
    found: dict[tuple[int, str], float] = {}
    for file, tensors in files.items():
        for name, tensor in tensors.items():
            if (match := _NAME.fullmatch(name)) is not None:
                place = StoredTensor(file, name, tensor.dtype, tensor.shape, tensor.begin, tensor.end)
                found[int(match[1]), match[2]] = read_scale(place)
    if not found:
        return ()
    for layer in layers:
        for side in "kv":
            if (layer, side) not in found:
                raise ModelFileError(f"{path}: layer {layer} has no {side}_scale of its KV cache, and others have one")
    return tuple(Scales(found[layer, "k"], found[layer, "v"]) for layer in layers)


def read_scale(tensor: StoredTensor) -> float:
    """Return a tensor of one number. Errors: ModelFileError if it has more, or its number is not positive."""
    file, name = tensor.path, tensor.source_name
    if tensor.type not in ("F32", "F16", "BF16") or math.prod(tensor.shape) != 1:
        shape = list(tensor.shape)
        raise ModelFileError(f"{file}: {name} is {tensor.type} {shape}; supported is one number for all")
    with map_file(file) as data:
        number = float(dequantize(np.frombuffer(data[tensor.begin : tensor.end], np.uint8), tensor.type)[0])
    if not 0 < number < math.inf:
        raise ModelFileError(f"{file}: {name} is {number}; a scale is a positive number")
    return number
