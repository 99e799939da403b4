"""Loading of a model: with this engine's own code if it has the architecture, else with transformers'."""

import contextlib
import ctypes
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from core.device import cuda_device, start_cpu_kernels, start_torch
from core.model_files.load_format import open_weights
from core.model_files.model_config import SUPPORTED_ARCHITECTURES, read_model_config
from core.model_files.pooling import pools, read_pooler
from core.models.config import EncoderParts, ModelConfig
from core.models.encoder import Encoder
from core.models.interface import Model
from core.models.llama import Llama
from core.models.stored_matrix import Weight
from core.models.weight_form import WeightForm, best_form
from core.pooling.pooler import Pooler
from ipc.config import EngineConfig
from ipc.errors import ConfigError
from ipc.files.gguf import forget_gguf
from ipc.files.model_files import model_fingerprint
from kernels.cpu.library import CpuLibrary
from kernels.elements import Dtype


class LoadedModel(NamedTuple):
    """A model with its weights, and their identity."""

    model: Model
    fingerprint: str  # hexadecimal digest that identifies the weights
    label: str  # prefix of the model's fingerprint
    pooler: Pooler | None = None  # of a model that pools, which generates no tokens then
    encoder: EncoderParts | None = None  # of an encoder


def load_model(path: Path, dtype: Dtype, config: EngineConfig) -> LoadedModel:
    """Load the model of a folder or .gguf file, to run in dtype on the config's device.

    Errors: ModelFileError, UnsupportedModelError; ConfigError for options that do not fit the model; OutOfMemoryError
    if the weights do not fit the GPU.
    """
    if config.model_impl == "native" or (config.model_impl == "auto" and not _is_foreign(path)):
        model_config = read_model_config(path)
        if config.device == "cuda":
            if config.quantization in ("stored", "int8"):
                raise ConfigError(f"quantization={config.quantization!r} is of device='cpu': a GPU's is 'none'")
            if pools(config, path, model_config):
                raise ConfigError(f"{path} pools, and device='cuda' generates only: use device='cpu'")
            weights = open_weights(config.load_format, path, model_config, dtype)
            # Imported here: only this path needs torch and triton.
            from core.models.device_model import device_model

            return LoadedModel(
                device_model(model_config, weights.tensors, dtype, cuda_device()), weights.fingerprint, weights.label
            )
        library = start_cpu_kernels(config)
        if model_config.encoder is not None:
            _check_encoder(path, config, library)
        if library is None or config.numerics == "L0":
            start_torch(config)
        form = _weight_form(config, model_config, library)
        weights = open_weights(config.load_format, path, model_config, dtype, library)
        native = _native(model_config, weights.tensors, dtype, config, library, form)
        pooler = read_pooler(config, path, native) if pools(config, path, model_config) else None
        _return_free_memory()
        return LoadedModel(native, weights.fingerprint, weights.label, pooler, model_config.encoder)
    if config.quantization in ("stored", "int8"):
        raise ConfigError(f"quantization={config.quantization!r} does not fit {path}, which transformers' code runs")
    if config.runner == "pooling":
        raise ConfigError(f"{path}: models that run through transformers' code do not pool: leave runner at 'auto'")
    if config.device == "cuda":
        raise ConfigError(
            f"device='cuda' runs models of our own, and {path} needs transformers' code: use device='cpu'"
        )
    if config.load_format == "gguf":
        raise ConfigError(f"load_format='gguf' does not fit {path}, which transformers' code runs: use 'auto'")
    # Imported here: transformers and torch take seconds to import, and in-tree models never need them.
    start_torch(config)
    from core.models.transformers_model import TransformersModel

    made_up = config.load_format == "dummy"
    model = TransformersModel(path, dtype, made_up=made_up, max_model_len=config.max_model_len)
    if made_up:
        return LoadedModel(model, hashlib.sha256((path / "config.json").read_bytes()).hexdigest(), "dummy-")
    return LoadedModel(model, model_fingerprint(path), "")


def _check_encoder(path: Path, config: EngineConfig, library: CpuLibrary | None) -> None:
    """Refuse options with which encoders do not run. Errors: ConfigError."""
    if library is None or config.numerics == "L0":
        raise ConfigError(
            f"{path} is an encoder, which needs the C kernels: install a C compiler or a wheel, and leave numerics and "
            "cpu_kernels out"
        )
    if config.quantization == "int8":
        raise ConfigError(f"quantization='int8' does not fit {path}, which is an encoder: leave it out")


def _native(
    model: ModelConfig,
    weights: Iterable[tuple[str, Weight]],
    dtype: Dtype,
    config: EngineConfig,
    library: CpuLibrary | None,
    form: WeightForm,
) -> Llama | Encoder:
    """Return a model of our own with its weights. Errors: ModelFileError."""
    if model.encoder is None:
        return Llama(model, weights, dtype, config.numerics, library, form=form)
    assert library is not None, "an encoder needs the C kernels"
    return Encoder(model, weights, dtype, library)


def _weight_form(config: EngineConfig, model_config: ModelConfig, library: CpuLibrary | None) -> WeightForm:
    """Return the form of matrices in memory. Errors: ConfigError for one that only the C kernels have, without them."""
    if config.quantization == "none":
        return WeightForm.DENSE
    if library is None or config.numerics == "L0":
        if config.quantization == "auto":
            return WeightForm.DENSE
        raise ConfigError(
            f"quantization={config.quantization!r} needs the C kernels, at numerics level L2: use quantization='none'"
        )
    if config.quantization == "auto":
        return best_form(library, model_config)
    return WeightForm.STORED if config.quantization == "stored" else WeightForm.INT8


def _return_free_memory() -> None:
    """Return free memory to the operating system.

    The vocabulary of a GGUF file and the temporary copies of tensors are an eighth of a small model's size.
    """
    forget_gguf()
    with contextlib.suppress(AttributeError):  # a C library that is not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _is_foreign(path: Path) -> bool:
    """Return whether the model folder's config.json names only architectures that are not in-tree.

    It is False for unreadable files: the in-tree reader reports their errors.
    """
    try:
        names = json.loads((path / "config.json").read_bytes()).get("architectures")
    except (OSError, ValueError, AttributeError, RecursionError):
        return False
    return isinstance(names, list) and bool(names) and not set(map(str, names)) & set(SUPPORTED_ARCHITECTURES)
