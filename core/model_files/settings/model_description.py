"""What a model's files say of it: family, size, how its weights are stored, and the names of a classifier's labels."""

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

from core.model_files.settings.config_json import PLAIN_METHOD, read_json_object
from ipc.errors import ModelFileError, UnsupportedModelError
from ipc.files.gguf import read_gguf
from ipc.files.model_files import resolve_model
from ipc.files.safetensors import read_safetensors_folder
from ipc.options.config import EngineConfig
from ipc.wire.messages import ModelDescription

#: general.file_type of GGUF files -> llama.cpp's name. Of others the type that has most of the bytes is taken.
_FILE_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    25: "IQ4_NL",
    30: "IQ4_XS",
    32: "BF16",
    38: "MXFP4",
}
#: A row of int32 is several numbers, in a way that each method has for itself.
_PACKED = ("I32", "U32")


def describe_model(config: EngineConfig) -> ModelDescription | None:
    """Return the description of a config's model; None if there are no files, or they cannot be read.

    What is wrong with files is said where they are loaded.
    """
    if config.executor == "fake" and config.model is None:
        return None
    try:
        model = resolve_model(config.model)
        return _of_gguf(model) if model.suffix == ".gguf" else _of_folder(model)
    except (ModelFileError, UnsupportedModelError):
        return None


def _of_gguf(path: Path) -> ModelDescription:
    header = read_gguf(path)
    sizes = Counter[str]()
    for tensor in header.tensors.values():
        sizes[tensor.type] += tensor.num_bytes
    file_type = header.metadata.get("general.file_type")
    named = _FILE_TYPES.get(file_type) if isinstance(file_type, int) else None
    return ModelDescription(
        format="gguf",
        family=str(header.metadata.get("general.architecture") or ""),
        num_parameters=sum(prod(tensor.shape) for tensor in header.tensors.values()),
        quantization=named or (sizes.most_common(1)[0][0] if sizes else ""),
        num_bytes=header.file_bytes,
    )


def _of_folder(folder: Path) -> ModelDescription:
    values = read_json_object(folder / "config.json")
    try:
        tensors = [one for file in read_safetensors_folder(folder).values() for one in file.values()]
    except (ModelFileError, UnsupportedModelError):
        tensors = []  # made up
    sizes = Counter[str]()
    for tensor in tensors:
        sizes[tensor.dtype] += tensor.end - tensor.begin
    is_packed = any(tensor.dtype in _PACKED for tensor in tensors)
    settings = values.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    is_named = isinstance(method, str) and method != PLAIN_METHOD
    return ModelDescription(
        format="safetensors",
        family=str(values.get("model_type") or ""),
        num_parameters=0 if is_packed else sum(prod(tensor.shape) for tensor in tensors),
        quantization=str(method).upper() if is_named else sizes.most_common(1)[0][0] if sizes else "",
        num_bytes=sum(sizes.values()),
        labels=_labels(values.get("id2label")),
    )


def _labels(given: Any) -> list[str]:
    """Return the names of a classifier's labels in the order of their numbers."""
    if not isinstance(given, dict):
        return []
    names = [given.get(str(number)) for number in range(len(given))]
    return [str(name) for name in names] if None not in names else []
