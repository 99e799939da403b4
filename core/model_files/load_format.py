"""Where a model's weights come from: its files, or a fixed random pattern in their place."""

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from core.model_files.model_config import ModelConfig
from core.model_files.weights import expected_shapes, load_weights
from core.models.stored_matrix import Weight
from ipc.config import LoadFormat
from ipc.errors import ConfigError
from ipc.files.model_files import model_fingerprint
from kernels.cpu.library import CpuLibrary

_STD = 0.02  # of made-up weights, as transformers initializes them
#: Made-up weights repeat after so many. A prime: no two rows of a matrix begin at the same one.
_PERIOD = 1_048_573


class OpenedWeights(NamedTuple):
    """Weights, ready to be taken one by one."""

    tensors: Iterator[tuple[str, Weight]]  # names and order of expected_shapes
    fingerprint: str  # hex; of what the weights are
    label: str  # what the model's fingerprint begins with


def open_weights(
    load_format: LoadFormat,
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    library: CpuLibrary | None = None,
) -> OpenedWeights:
    """The weights of a model as load_format says. library: of the C kernels, which dequantize; None = torch does.
    Errors: ConfigError for one that does not fit; load_weights'."""
    if load_format == "dummy":
        identity = hashlib.sha256(msgspec.json.encode(config)).hexdigest()
        return OpenedWeights(_made_up(config, dtype), identity, "dummy-")
    found = "gguf" if path.suffix == ".gguf" else "safetensors"
    if load_format not in ("auto", found):
        raise ConfigError(f"load_format={load_format!r} does not fit {path}, which is {found}; use 'auto'")
    tensors = load_weights(path, config, dtype, library)
    return OpenedWeights(tensors, model_fingerprint(path), "")


def _made_up(config: ModelConfig, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Matrices of normally distributed numbers, the same every time; norms of 1, biases of 0."""
    generator = torch.Generator().manual_seed(0)
    pattern = (torch.randn(_PERIOD, generator=generator) * _STD).to(dtype)
    start = 0
    for name, shape in expected_shapes(config).items():
        if len(shape) == 1:
            yield name, torch.full(shape, 0.0 if name.endswith(".bias") else 1.0, dtype=dtype)
            continue
        size = math.prod(shape)
        weights = torch.empty(size, dtype=dtype)
        for begin in range(0, size, _PERIOD):
            piece = weights[begin : begin + _PERIOD]
            head = pattern[start : start + len(piece)]
            piece[: len(head)] = head
            piece[len(head) :] = pattern[: len(piece) - len(head)]
        start = (start + size) % _PERIOD
        yield name, weights.view(shape)
