"""Adapters: one engine's adapters, by content and by name.

The border's thread for calls reads and packs them before a request names them, so no step waits for a file. An adapter
is kept as long as it has a name or a live request. Names are handled by the border; the scheduler and the executor only
use digests.
"""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from core import log
from core.adapters.adapter import AdapterWeights
from core.adapters.file_matrix import FileMatrix
from core.adapters.gguf_adapter import read_gguf_adapter
from core.adapters.peft_folder import read_peft_folder
from core.adapters.remembered import RememberedModules
from core.holders import Holders
from ipc.errors import EngineCoreError, InvalidRequestError, ModelFileError
from ipc.options.config import EngineConfig
from ipc.wire.lora_messages import AdapterId, LoraAdapter

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

    host: the model's interface. Errors of the constructor: those of load(), for the config's lora_modules.
    """

    def __init__(self, config: EngineConfig, host: AdapterHost) -> None:
        self._host, self._max_rank = host, config.max_lora_rank
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
        """Read an adapter's files and give it a name. Errors: ModelFileError, UnsupportedModelError."""
        if not name or len(name) > MAX_NAME_CHARS:
            raise ModelFileError(f"an adapter's name has 1 to {MAX_NAME_CHARS} characters; got {name!r:.80}")
        with self._loading:
            weights = self._read(Path(path))
            with self._lock:
                packed = self._packed.get(weights.digest)
            packed = packed or self._host.pack(weights)
            listed = LoraAdapter(name, weights.digest, weights.rank, packed.num_bytes, str(path))
            with self._lock:
                before, self._names[name] = self._names.get(name), listed
                self._packed[weights.digest] = packed
                if before is not None:
                    self._drop_if_unused(before.digest)
        self._note()
        return listed

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
