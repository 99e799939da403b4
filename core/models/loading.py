"""Which code runs a model: ours where it knows the architecture, else transformers'."""

import json
from pathlib import Path

import torch

from core.model_config import SUPPORTED_ARCHITECTURES, read_model_config
from core.models.interface import Model
from core.models.llama import Llama
from core.weights import load_weights
from ipc.config import EngineConfig


def load_model(path: Path, dtype: torch.dtype, config: EngineConfig) -> Model:
    """Errors: ModelFileError, UnsupportedModelError."""
    if config.model_impl == "native" or (config.model_impl == "auto" and not _is_foreign(path)):
        model_config = read_model_config(path)
        return Llama(model_config, load_weights(path, model_config, dtype), dtype, config.numerics)
    # Imported here: transformers takes seconds, and models of our own never need it.
    from core.models.transformers_model import TransformersModel

    return TransformersModel(path, dtype)


def _is_foreign(path: Path) -> bool:
    """A model folder whose config.json names only architectures that are not ours; whatever else is wrong with a file
    is said by our own reader."""
    try:
        names = json.loads((path / "config.json").read_bytes()).get("architectures")
    except (OSError, ValueError, AttributeError, RecursionError):
        return False
    return isinstance(names, list) and bool(names) and not set(map(str, names)) & set(SUPPORTED_ARCHITECTURES)
