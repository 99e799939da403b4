"""Adapters: one engine's adapters, by content and by name.

The border's thread for calls reads and packs them before a request names them, so no step waits for a file. An adapter
is kept as long as it has a name or a live request. Names are handled by the border; the scheduler and the executor only
use digests.
"""

import math
import mmap
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from core import log
from core.adapters.adapter import AdapterWeights, checked_weights
from core.adapters.file_matrix import FileMatrix, model_matrices
from core.adapters.peft_folder import read_peft_folder
from core.adapters.remembered import RememberedModules
from core.holders import Holders
from ipc.errors import (
    EngineCoreError,
    InvalidRequestError,
    ModelFileError,
    OutOfMemoryError,
    UnsupportedModelError,
)
from ipc.files.gguf import GgufTensor, read_gguf
from ipc.files.mapped_file import map_file
from ipc.options.config import EngineConfig
from ipc.wire.lora_messages import AdapterId, LoraAdapter
from kernels.dequantize import BLOCK_SIZES, dequantize
from kernels.elements import BFLOAT16, FLOAT16, FLOAT32, Numbers
from kernels.low_rank import LowRank

MAX_NAME_CHARS = 256


class PackedAdapter(Protocol):
    """An adapter in the form that a model computes with."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes that it takes in memory."""


class AdapterHost(Protocol):
    """A model that supports adapters."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, int]]:
        """Return [out, in] of the matrices that adapters may change, by name."""

    @property
    def peft_layers(self) -> Mapping[str, FileMatrix]:
        """Return the linear layers that adapters may change, by their names in PEFT's files."""

    @property
    def gguf_layers(self) -> Mapping[str, FileMatrix]:
        """Return the same layers by their names in GGUF files."""

    def pack(self, weights: AdapterWeights) -> PackedAdapter:
        """Return an adapter, which changes some of these matrices, in the model's form."""


class Adapters:
    """One engine's adapters. All methods may be called from any thread.

    host: the model's interface. most: adapters for which there is memory; None = packing one finds out. Errors of the
    constructor: those of load(), for the config's lora_modules.
    """

    def __init__(self, config: EngineConfig, host: AdapterHost, most: int | None = None) -> None:
        self._host, self._max_rank, self._most = host, config.max_lora_rank, most
        self._lock = threading.Lock()  # for everything below
        self._loading = threading.Lock()  # one adapter at a time
        self._memory = RememberedModules(-1)
        self._names: dict[str, LoraAdapter] = {}
        self._packed: dict[str, PackedAdapter] = {}  # by digest
        self._held = Holders[str](self._lock, self._drop_if_unused)  # digests of the live AdapterIds
        for name, path in config.lora_modules.items():
            self.load(name, path)

    def remember(self, memory: RememberedModules) -> None:
        """Continue with the names that the previous engine had, and store this engine's names for the next one.

        Adapters that can no longer be read are left out and logged.
        """
        self._memory = memory
        before = memory.read()
        if before is not None:
            for name in [listed.name for listed in self.list() if listed.name not in before]:
                self.unload(name)
            for name, path in before.items():
                try:
                    self.load(name, path)
                except EngineCoreError as error:
                    log.say(f"engine-core: the adapter {name!r:.80} could not be loaded again: {error}")
        self._note()

    def load(self, name: str, path: str) -> LoraAdapter:
        """Read an adapter's files and give it a name.

        Errors: ModelFileError, UnsupportedModelError; OutOfMemoryError if there is no room for one more.
        """
        if not name or len(name) > MAX_NAME_CHARS:
            raise ModelFileError(f"an adapter's name has 1 to {MAX_NAME_CHARS} characters; got {name!r:.80}")
        with self._loading:
            weights = self._read(Path(path))
            with self._lock:
                packed = self._packed.get(weights.digest)
                if packed is None and self._most is not None and len(self._packed) >= self._most:
                    raise OutOfMemoryError(
                        f"max_loras={self._most} adapters are loaded or in use, and the GPUs have memory for no more: "
                        "unload one, or raise max_loras"
                    )
            packed = packed or self._host.pack(weights)
            listed = LoraAdapter(name, weights.digest, weights.rank, packed.num_bytes, str(path))
            with self._lock:
                before, self._names[name] = self._names.get(name), listed
                self._packed[weights.digest] = packed
                if before is not None:
                    self._drop_if_unused(before.digest)
        self._note()
        return listed

    def put(self, weights: AdapterWeights) -> None:
        """Keep an adapter without a name, until drop()."""
        packed = self._host.pack(weights)
        with self._lock:
            self._packed[weights.digest] = packed

    def drop(self, digest: str) -> None:
        """Forget an adapter of put(). Rows that run with it keep it."""
        with self._lock:
            self._packed.pop(digest, None)

    @property
    def digests(self) -> set[str]:
        """Return the digests of all adapters that are kept."""
        with self._lock:
            return set(self._packed)

    def unload(self, name: str) -> bool:
        """Forget a name; return whether there was one."""
        with self._lock:
            self._held.settle()
            listed = self._names.pop(name, None)
            if listed is not None:
                self._drop_if_unused(listed.digest)
        self._note()
        return listed is not None

    def _note(self) -> None:
        self._memory.write({listed.name: listed.path for listed in self.list()})

    def list(self) -> list[LoraAdapter]:
        """Return the adapters that have names, ordered by name."""
        with self._lock:
            return sorted(self._names.values(), key=lambda listed: listed.name)

    def hold(self, adapter: AdapterId) -> None:
        """Keep an adapter as long as this object lives. Errors: InvalidRequestError if it is not loaded."""
        digest = adapter.digest
        with self._lock:
            if digest not in self._packed:
                raise InvalidRequestError(
                    f"no adapter with the digest {digest!r:.40} is loaded: its owner has unloaded it, or its files "
                    "have changed; load it again"
                )
            self._held.hold(adapter, digest)

    def find(self, digest: str) -> Any:
        """Return a request's adapter, packed for the model.

        Errors: ModelFileError if it is not loaded. In a running engine, hold() has checked that before; a replay does
        not call hold().
        """
        with self._lock:
            packed = self._packed.get(digest)
        if packed is None:
            raise ModelFileError(f"the adapter with the digest {digest} is not loaded: name its files in lora_modules")
        return packed

    def _read(self, path: Path) -> AdapterWeights:
        if path.suffix == ".gguf":
            return read_gguf_adapter(path, self._host.gguf_layers, self._host.shapes, self._max_rank)
        return read_peft_folder(path, self._host.peft_layers, self._host.shapes, self._max_rank)

    def _drop_if_unused(self, digest: str) -> None:
        if digest not in self._held and all(listed.digest != digest for listed in self._names.values()):
            self._packed.pop(digest, None)


# Adapters as written by llama.cpp's convert_lora_to_gguf.py: one .gguf file of general.type adapter.


_NAME = re.compile(r"(?P<matrix>.+)\.weight\.(?P<part>lora_[ab])")
_PLAIN = {"F32": FLOAT32, "F16": FLOAT16, "BF16": BFLOAT16}


def read_gguf_adapter(
    path: Path, layers: Mapping[str, FileMatrix], shapes: Mapping[str, tuple[int, int]], max_rank: int
) -> AdapterWeights:
    """Return the adapter in a file; see checked_weights(). layers: those that adapters may change, by name.

    Errors: ModelFileError; UnsupportedModelError naming the unsupported tensor.
    """
    header = read_gguf(path)
    kinds = header.metadata.get("general.type"), header.metadata.get("adapter.type")
    if kinds != ("adapter", "lora"):
        raise ModelFileError(f"{path}: general.type and adapter.type are {kinds}; expected an adapter of type lora")
    alpha = header.metadata.get("adapter.lora.alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise ModelFileError(f"{path}: adapter.lora.alpha must be a number; got {alpha!r:.80}")
    pairs: dict[str, dict[str, Numbers]] = {}
    with map_file(path) as file:
        for name, tensor in header.tensors.items():
            match = _NAME.fullmatch(name)
            if match is None or match["matrix"] not in layers:
                raise UnsupportedModelError(
                    f"{path}: tensor {name!r:.80} is not the lora_a or lora_b of a matrix that adapters may change"
                )
            pairs.setdefault(match["matrix"], {})[match["part"]] = _numbers(file, tensor, path)
    matrices: dict[str, LowRank] = {}
    for name, pair in pairs.items():
        if len(pair) < 2:
            raise ModelFileError(f"{path}: {name} has {', '.join(pair)} alone")
        # Without alpha llama.cpp uses the product unscaled.
        scale = float(alpha) / max(1, len(pair["lora_a"])) if alpha else 1.0
        matrices[name] = LowRank(pair["lora_a"], pair["lora_b"], scale)
    return checked_weights(path, model_matrices(path, matrices, layers), shapes, max_rank)


def _numbers(file: mmap.mmap, tensor: GgufTensor, path: Path) -> Numbers:
    """Return a copy of a matrix, because the file may change while requests use the adapter."""
    if len(tensor.shape) != 2:
        raise ModelFileError(f"{path}: tensor {tensor.name!r:.80} has shape {list(tensor.shape)}; expected a matrix")
    if tensor.type not in BLOCK_SIZES:
        known = ", ".join(BLOCK_SIZES)
        raise UnsupportedModelError(f"{path}: tensor {tensor.name!r:.80} is {tensor.type}; supported are {known}")
    data = np.frombuffer(bytearray(file[tensor.offset : tensor.offset + tensor.num_bytes]), np.uint8)
    plain = _PLAIN.get(tensor.type)
    return (dequantize(data, tensor.type) if plain is None else data.view(plain)).reshape(tensor.shape)
