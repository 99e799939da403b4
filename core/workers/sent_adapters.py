"""Adapters of an engine with workers: the engine reads them and sends them, and each worker packs its own part."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from core.adapters.adapter import AdapterWeights
from core.adapters.file_matrix import FileMatrix
from core.adapters.store import Adapters
from core.model_files.model_config import read_model_config
from core.model_files.tensors.adapted_layers import gguf_layers, peft_layers
from core.models.layers.adapted import AdaptedMatrices
from core.workers.messages import AddMatrix, SentNumbers
from ipc.files.model_files import resolve_model
from ipc.options.config import EngineConfig
from kernels.elements import ELEMENT_TYPES, Numbers, element_name
from kernels.low_rank import LowRank


class SentAdapter(NamedTuple):
    """An adapter as it is sent to workers."""

    weights: AdapterWeights

    @property
    def num_bytes(self) -> int:
        """Return the bytes that it takes in the engine's memory."""
        return sum(one.a.nbytes + one.b.nbytes for one in self.weights.matrices.values())

    def messages(self) -> Iterator[AddMatrix]:
        """Yield the messages that give it to a worker, in order."""
        left = len(self.weights.matrices)
        for name, (a, b, scale) in self.weights.matrices.items():
            left -= 1
            yield AddMatrix(self.weights.digest, name, _sent(a), _sent(b), scale, is_last=not left)


class ReceivedAdapters:
    """A worker's adapters, which arrive matrix by matrix."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self._matrices: dict[str, LowRank] = {}

    def add(self, message: AddMatrix) -> None:
        """Keep one more matrix; with the last one the adapter can be used."""
        self._matrices[message.name] = LowRank(_numbers(message.a), _numbers(message.b), message.scale)
        if message.is_last:
            self._adapters.put(AdapterWeights(self._matrices, message.digest))
            self._matrices = {}

    def drop(self, digests: list[str]) -> None:
        """Forget adapters."""
        for digest in digests:
            self._adapters.drop(digest)


class _Host:
    """The matrices of a model that workers compute, as an AdapterHost."""

    def __init__(self, config: EngineConfig) -> None:
        model = read_model_config(resolve_model(config.model), config.mmproj)
        self.peft_layers: Mapping[str, FileMatrix] = peft_layers(model)
        self.gguf_layers: Mapping[str, FileMatrix] = gguf_layers(model)
        self.shapes: Mapping[str, tuple[int, int]] = AdaptedMatrices(model, None).shapes

    def pack(self, weights: AdapterWeights) -> SentAdapter:
        """Return the adapter as it is sent."""
        return SentAdapter(weights)


def sent_adapters(config: EngineConfig) -> Adapters | None:
    """Return the adapters of an engine whose workers have loaded the model; None without enable_lora.

    Workers on GPUs keep memory free for max_loras of them (core/executors/cuda.py).
    Errors: those of Adapters, for the config's lora_modules.
    """
    if not config.enable_lora:
        return None
    return Adapters(config, _Host(config), config.max_loras if config.device == "cuda" else None)


def _sent(numbers: Numbers) -> SentNumbers:
    return SentNumbers(element_name(numbers.dtype), numbers.shape[0], np.ascontiguousarray(numbers).tobytes())


def _numbers(sent: SentNumbers) -> Numbers:
    # A copy: torch warns of numbers that cannot be written.
    return np.frombuffer(bytearray(sent.content), ELEMENT_TYPES[sent.dtype]).reshape(sent.num_rows, -1)
