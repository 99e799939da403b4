"""The source of a model's weights: its files, or a fixed random pattern instead of them."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from core.model_files.model_config import ModelConfig
from core.model_files.progress import counted
from core.model_files.tensors.weight_shapes import expected_shapes
from core.model_files.tensors.weights import load_weights
from core.models.operations.stored_matrix import StoredMatrix, StoredPart, Weight
from ipc.errors import ConfigError, ModelFileError
from ipc.files.model_files import model_fingerprint
from ipc.options.model_options import LoadFormat
from ipc.tables.arrays import UInt8s
from kernels.cpu.library import CpuLibrary
from kernels.dequantize import PLAIN_TYPES
from kernels.elements import Dtype, Numbers, rounded

#: Numbers checked at a time: they stay in a core's cache.
_CHECKED_AT_ONCE = 1 << 17
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


class CheckedWeights:
    """The weights of a file that replace a model's, to be read one by one like those of open_weights().

    A second thread hashes their numbers, and checks that none is NaN or infinite: each of them would fail all requests.
    """

    def __init__(self, path: Path, weights: Iterator[tuple[str, Weight]]) -> None:
        """weights: of the file, whose names and shapes are right."""
        self._path, self._weights = path, weights
        self._digest = hashlib.sha256()

    def __iter__(self) -> Iterator[tuple[str, Weight]]:
        """Yield the weights. Errors: ModelFileError after the last one, which names a tensor that is not finite."""
        faults: list[str] = []
        with ThreadPoolExecutor(1, "weights") as thread:
            for name, weight in self._weights:
                matrix = StoredMatrix.of(np.atleast_2d(weight)) if isinstance(weight, np.ndarray) else weight
                thread.submit(self._check, name, matrix.parts, faults)
                yield name, weight
        if faults:
            raise ModelFileError(f"{self._path}: tensor {faults[0]} has numbers that are NaN or infinite")

    def hexdigest(self) -> str:
        """Return the digest of all tensors, whatever kind of file they came in. Call it after the last one."""
        return self._digest.hexdigest()

    def _check(self, name: str, parts: Sequence[StoredPart], faults: list[str]) -> None:
        for part in parts:
            self._digest.update(f"{name} {part.type_name} {part.rows} {part.depth}\n".encode())
            self._digest.update(part.data.data)
            if part.type_name in PLAIN_TYPES and not are_finite(part.data.reshape(-1), part.type_name):
                faults.append(name)


def are_finite(data: UInt8s, type_name: str) -> bool:
    """Return whether no number of these bytes is NaN or infinite: whether no exponent has all bits set."""
    exponent = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}[type_name]
    numbers = data.view(np.uint32 if type_name == "F32" else np.uint16)
    found = np.empty(min(len(numbers), _CHECKED_AT_ONCE), numbers.dtype)
    for begin in range(0, len(numbers), _CHECKED_AT_ONCE):
        piece = numbers[begin : begin + _CHECKED_AT_ONCE]
        if np.bitwise_and(piece, numbers.dtype.type(exponent), out=found[: len(piece)]).max() == exponent:
            return False
    return True


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
