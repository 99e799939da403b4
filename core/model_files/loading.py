"""Which code runs a model: ours where it knows the architecture, else transformers'."""

import contextlib
import ctypes
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from core.device import start_cpu_kernels
from core.model_files.load_format import open_weights
from core.model_files.model_config import SUPPORTED_ARCHITECTURES, read_model_config
from core.models.config import ModelConfig
from core.models.interface import Model
from core.models.llama import Llama
from ipc.config import EngineConfig
from ipc.errors import ConfigError, OutOfMemoryError
from ipc.files.gguf import forget_gguf
from ipc.files.model_files import model_fingerprint


class LoadedModel(NamedTuple):
    model: Model
    fingerprint: str  # hex; of what the weights are
    label: str  # what the model's fingerprint begins with


def load_model(path: Path, dtype: torch.dtype, config: EngineConfig) -> LoadedModel:
    """Errors: ModelFileError, UnsupportedModelError; ConfigError for a load_format that does not fit."""
    if config.model_impl == "native" or (config.model_impl == "auto" and not _is_foreign(path)):
        model_config = read_model_config(path)
        if config.device == "cuda":
            weights = open_weights(config.load_format, path, model_config, dtype)
            on_device = _device_model(model_config, weights.tensors, dtype)
            return LoadedModel(on_device, weights.fingerprint, weights.label)
        library = start_cpu_kernels(config)
        weights = open_weights(config.load_format, path, model_config, dtype, library)
        native = Llama(model_config, weights.tensors, dtype, config.numerics, library)
        _return_free_memory()
        return LoadedModel(native, weights.fingerprint, weights.label)
    if config.device == "cuda":
        raise ConfigError(
            f"device='cuda' runs models of our own, and {path} needs transformers' code: use device='cpu'"
        )
    if config.load_format == "gguf":
        raise ConfigError(f"load_format='gguf' does not fit {path}, which transformers' code runs: use 'auto'")
    # Imported here: transformers takes seconds, and models of our own never need it.
    from core.models.transformers_model import TransformersModel

    made_up = config.load_format == "dummy"
    model = TransformersModel(path, dtype, made_up=made_up, max_model_len=config.max_model_len)
    if made_up:
        return LoadedModel(model, hashlib.sha256((path / "config.json").read_bytes()).hexdigest(), "dummy-")
    return LoadedModel(model, model_fingerprint(path), "")


def _return_free_memory() -> None:
    """To the system: a vocabulary, and what tensors took on their way from a file to a packed one, are an eighth of a
    small model."""
    forget_gguf()
    with contextlib.suppress(AttributeError):  # a C library that is not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _device_model(config: ModelConfig, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Llama:
    """Errors: ConfigError where there is no device; OutOfMemoryError."""
    # Imported here: only device=cuda needs triton.
    from core.device import cuda_device
    from core.models.triton_operations import TritonOperations

    device = cuda_device()
    moved = ((name, tensor.to(device)) for name, tensor in tensors)
    try:
        return Llama(config, moved, dtype, operations=TritonOperations(config, dtype, device))
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(f"the model's weights do not fit the GPU: {error}") from error


def _is_foreign(path: Path) -> bool:
    """A model folder whose config.json names only architectures that are not ours; whatever else is wrong with a file
    is said by our own reader."""
    try:
        names = json.loads((path / "config.json").read_bytes()).get("architectures")
    except (OSError, ValueError, AttributeError, RecursionError):
        return False
    return isinstance(names, list) and bool(names) and not set(map(str, names)) & set(SUPPORTED_ARCHITECTURES)
