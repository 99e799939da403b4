"""load: the model that a config names, and what is reported of it; a part of the executors that run one."""

import hashlib
from typing import NamedTuple

import torch

from core.execution.executor import ModelInfo
from core.model_files.loading import load_model
from core.models.interface import Model
from ipc.config import EngineConfig
from ipc.files.hub import hub_name
from ipc.files.model_files import resolve_model

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Loaded(NamedTuple):
    model: Model
    info: ModelInfo


def load(config: EngineConfig, usual_dtype: torch.dtype) -> Loaded:
    """Load the config's model on the config's device. usual_dtype: what dtype "auto" becomes. Errors: ModelFileError,
    UnsupportedModelError, ConfigError, OutOfMemoryError."""
    path = resolve_model(config.model)
    dtype = _DTYPES[config.dtype] if config.dtype != "auto" else usual_dtype
    model, fingerprint, label = load_model(path, dtype, config)
    info = ModelInfo(
        name=hub_name(path) or path.name,
        fingerprint=label + _fingerprint(fingerprint, dtype, model.variant),
        dtype=str(dtype).removeprefix("torch."),
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        numerics=model.numerics,
    )
    return Loaded(model, info)


def _fingerprint(weights: str, dtype: torch.dtype, variant: str) -> str:
    parts = (weights, str(dtype), variant, torch.__version__)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
