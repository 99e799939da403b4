"""Adapters as saved by PEFT: a folder with adapter_config.json and adapter_model.safetensors."""

import mmap
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from core.adapters.adapter import AdapterWeights, checked_weights
from core.adapters.file_matrix import FileMatrix, model_matrices
from core.adapters.peft_config import CONFIG_FILE, PeftConfig
from ipc.errors import ModelFileError, UnsupportedModelError
from ipc.files.mapped_file import map_file
from ipc.files.safetensors import SafetensorsTensor, read_safetensors
from kernels.elements import BFLOAT16, FLOAT16, FLOAT32, Numbers
from kernels.low_rank import LowRank

WEIGHTS_FILE = "adapter_model.safetensors"
_DTYPES = {"F32": FLOAT32, "F16": FLOAT16, "BF16": BFLOAT16}
#: base_model.model. and the name of the matrix; ".default" is PEFT's name for an adapter in memory.
_NAME = re.compile(r"(?:base_model\.model\.)?(?P<matrix>.+)\.(?P<part>lora_[AB])(?:\.default)?\.weight")


def read_peft_folder(
    folder: Path, layers: Mapping[str, FileMatrix], shapes: Mapping[str, tuple[int, int]], max_rank: int
) -> AdapterWeights:
    """Return the adapter in a folder written by PEFT's save_pretrained(); see checked_weights().

    layers: those that adapters may change, by name.

    Errors: ModelFileError; UnsupportedModelError naming the unsupported setting or tensor.
    """
    if not folder.is_dir():
        raise ModelFileError(f"{folder}: expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, or a .gguf file")
    config, path = PeftConfig(folder), folder / WEIGHTS_FILE
    if not path.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        hint = "; adapter_model.bin is a pickle, which is never loaded: save the adapter again" if pickled else ""
        raise ModelFileError(f"{folder}: {WEIGHTS_FILE} is missing{hint}")
    pairs: dict[str, dict[str, Numbers]] = {}
    tensors, stems = read_safetensors(path), sorted({name.partition(".")[0] for name in layers})
    with map_file(path) as file:
        for name, tensor in tensors.items():
            matrix, part = _parts_of(name, path)
            found = pairs.setdefault(_name_in_model(matrix, layers, stems), {})
            if part in found:
                raise ModelFileError(f"{path}: {part} of {matrix!r:.120} occurs twice")
            found[part] = _numbers(file, tensor, name, path)
    matrices: dict[str, LowRank] = {}
    for matrix, pair in pairs.items():
        if len(pair) < 2:
            raise ModelFileError(f"{path}: {matrix!r:.120} has {', '.join(pair)} alone")
        if len(pair["lora_A"]) != (rank := config.rank(matrix)):
            raise ModelFileError(
                f"{path}: {matrix!r:.120} has rank {len(pair['lora_A'])}, but {CONFIG_FILE} says {rank}"
            )
        matrices[matrix] = LowRank(pair["lora_A"], pair["lora_B"], config.scale(matrix))
    lacking = set(config.targets) - _endings(matrices)
    if lacking and (lost := sorted(lacking & _endings(layers))):  # PEFT also writes targets that match no layer
        raise ModelFileError(f"{path}: {CONFIG_FILE} names the target {lost[0]!r:.80}, but has no tensor for it")
    return checked_weights(path, model_matrices(path, matrices, layers), shapes, max_rank)


def _endings(names: Iterable[str]) -> set[str]:
    """Return all names that PEFT's target_modules may use for these: each full name, and its ends after dots."""
    return {".".join(parts[begin:]) for name in names for parts in [name.split(".")] for begin in range(len(parts))}


def _parts_of(name: str, path: Path) -> tuple[str, str]:
    """Return the matrix that a tensor belongs to, and lora_A or lora_B. Errors: UnsupportedModelError."""
    match = _NAME.fullmatch(name)
    if match is None:
        kind = next((one for one in ("lora_magnitude_vector", "lora_embedding", "lora_bias") if one in name), "")
        reason = f"{kind} is not supported" if kind else "it is neither lora_A nor lora_B of a linear layer"
        raise UnsupportedModelError(f"{path}: tensor {name!r:.120}: {reason}")
    return match["matrix"], match["part"]


def _name_in_model(matrix: str, layers: Mapping[str, FileMatrix], stems: Sequence[str]) -> str:
    """Return the model's name for the matrix. stems: first parts of the layers' names.

    Adapters of a model without a head omit that part ("model.").
    """
    return next((name for name in (matrix, *(f"{stem}.{matrix}" for stem in stems)) if name in layers), matrix)


def _numbers(file: mmap.mmap, tensor: SafetensorsTensor, name: str, path: Path) -> Numbers:
    """Return a copy of a matrix, because the file may change while requests use the adapter."""
    if (dtype := _DTYPES.get(tensor.dtype)) is None:
        known = ", ".join(_DTYPES)
        raise UnsupportedModelError(f"{path}: tensor {name!r:.120} is {tensor.dtype}; supported are {known}")
    if len(tensor.shape) != 2:
        raise ModelFileError(f"{path}: tensor {name!r:.120} has shape {list(tensor.shape)}; expected a matrix")
    data = np.frombuffer(bytearray(file[tensor.begin : tensor.end]), np.uint8)
    return data.view(dtype).reshape(tensor.shape)
