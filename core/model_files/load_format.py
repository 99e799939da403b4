"""The source of a model's weights: its files, or a fixed random pattern instead of them."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from core.model_files.model_config import ModelConfig
from core.model_files.progress import counted
from core.model_files.tensors.weight_shapes import expected_shapes
from core.model_files.tensors.weights import load_weights
from core.models.operations.stored_matrix import Weight
from ipc.errors import ConfigError
from ipc.files.model_files import model_fingerprint
from ipc.options.model_options import LoadFormat
from kernels.cpu.library import CpuLibrary
from kernels.elements import Dtype, Numbers, rounded

_STD = 0.02  # standard deviation of made-up weights, as in transformers' initialization
#: Period of the made-up weights. It is a prime, so that rows of a matrix start at different positions of the pattern.
_PERIOD = 1_048_573


class OpenedWeights(NamedTuple):
    """A model's weights, to be read one by one, and their identity."""

    tensors: Iterator[tuple[str, Weight]]  # with the names and order of expected_shapes
    fingerprint: str  # hexadecimal digest that identifies the weights
    label: str  # prefix of the model's fingerprint


def open_weights(
    load_format: LoadFormat,
    path: Path,
    config: ModelConfig,
    dtype: Dtype,
    library: CpuLibrary | None = None,
    reads: Callable[[str], bool] = lambda name: True,
) -> OpenedWeights:
    """Open the weights of a model in the form that load_format selects.

    library: the C kernels for dequantizing; None = NumPy is used. reads: whether the weight of a name is needed; others
    are not read. Errors: ConfigError for a load_format that does not match the files; the errors of load_weights().
    """
    wanted = {name: shape for name, shape in expected_shapes(config).items() if reads(name)}
    if load_format == "dummy":
        identity = hashlib.sha256(msgspec.json.encode(config)).hexdigest()
        return OpenedWeights(counted(made_up(expected_shapes(config), dtype, reads), wanted), identity, "dummy-")
    found = "gguf" if path.suffix == ".gguf" else "safetensors"
    if load_format not in ("auto", found):
        raise ConfigError(f"load_format={load_format!r} does not match {path}, which is {found}; use 'auto'")
    tensors = counted(load_weights(path, config, dtype, library, reads), wanted)
    return OpenedWeights(tensors, model_fingerprint(path), "")


def made_up(
    shapes: Mapping[str, tuple[int, ...]], dtype: Dtype, reads: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Numbers]]:
    """Yield made-up weights with these shapes: matrices of fixed normal random numbers, norms of 1, biases of 0.

    Norms and biases are float32, as in load_weights(). reads: see open_weights().
    """
    generator = np.random.Generator(np.random.PCG64(0))
    pattern = rounded(generator.standard_normal(_PERIOD, np.float32) * np.float32(_STD), dtype)
    start = 0
    for name, shape in shapes.items():
        if not reads(name):
            start = (start + math.prod(shape) * (len(shape) > 1)) % _PERIOD
            continue
        if len(shape) == 1:
            yield name, np.full(shape, 0.0 if name.endswith(".bias") else 1.0, np.float32)
            continue
        size = math.prod(shape)
        weights = np.empty(size, dtype)
        for begin in range(0, size, _PERIOD):
            piece = weights[begin : begin + _PERIOD]
            head = pattern[start : start + len(piece)]
            piece[: len(head)] = head
            piece[len(head) :] = pattern[: len(piece) - len(head)]
        start = (start + size) % _PERIOD
        yield name, weights.reshape(shape)
