"""AdapterCalls: the calls to load, unload and list adapters, and the border's check of adapters named in requests.

Files are read by a separate thread, which starts with the first LoadLora.
"""

import threading
import traceback
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from core import log
from ipc.errors import EngineCoreError, InvalidRequestError
from ipc.wire.lora_messages import AdapterId, ListLora, LoadLora, LoraAdapter, LoraAdapters, UnloadLora
from ipc.wire.messages import CallDone, CallFailed, ErrorCode, ServerMessage

_JOIN_S = 1.0  # seconds that close() waits for the adapter being read; then its thread is abandoned
_OFF = "this engine has no adapters: start it with enable_lora"


class AdapterShelf(Protocol):
    """Protocol of the engine's adapters, callable from any thread; implemented in core/adapters/store.py."""

    def load(self, name: str, path: str) -> LoraAdapter:
        """Read an adapter and give it a name. Errors: those of ipc.errors."""

    def unload(self, name: str) -> bool:
        """Forget a name; return whether there was one."""

    def list(self) -> list[LoraAdapter]:
        """Return the adapters that have names."""

    def hold(self, adapter: AdapterId) -> None:
        """Keep an adapter as long as this object lives. Errors: InvalidRequestError if it is not loaded."""


class AdapterCalls:
    """The adapters as seen by clients. Call all methods except _run() with the socket's lock held.

    shelf: None = adapters are not enabled. wake: called by the reading thread when take_done() has an answer.
    """

    def __init__(self, shelf: AdapterShelf | None, wake: Callable[[], None]) -> None:
        self._shelf, self._wake = shelf, wake
        self._asked: SimpleQueue[tuple[int, LoadLora] | None] = SimpleQueue()
        self._answers: SimpleQueue[tuple[int, ServerMessage]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def check(self, adapter: AdapterId) -> None:
        """Keep the adapter that a request names. Errors: InvalidRequestError if it is not loaded."""
        if self._shelf is None:
            raise InvalidRequestError(_OFF)
        self._shelf.hold(adapter)

    def answer(self, client: int, call: LoadLora | UnloadLora | ListLora, *, is_owner: bool) -> ServerMessage | None:
        """Return the answer; None for LoadLora, whose answer comes through take_done()."""
        shelf = self._shelf
        if shelf is None:
            if isinstance(call, ListLora):
                return LoraAdapters(call.call, [], False)
            return CallFailed(call.call, ErrorCode.INVALID_ARGUMENT, _OFF)
        match call:
            case ListLora():
                listed = shelf.list()
                if not is_owner:
                    listed = [LoraAdapter(one.name, one.digest, one.rank, one.num_bytes) for one in listed]
                return LoraAdapters(call.call, listed)
            case UnloadLora(number, name):
                if shelf.unload(name):
                    return CallDone(number)
                return CallFailed(number, ErrorCode.INVALID_ARGUMENT, f"no adapter has the name {name!r:.80}")
            case LoadLora():
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="adapters", daemon=True)
                    self._thread.start()
                self._asked.put((client, call))
        return None

    def take_done(self) -> list[tuple[int, ServerMessage]]:
        """Return (client, answer) for the answers that are ready."""
        return [self._answers.get_nowait() for _ in range(self._answers.qsize())]

    def close(self) -> None:
        """Stop the thread after the adapter that is being read."""
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join(_JOIN_S)

    # --- the reading thread ---

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            client, call = asked
            self._answers.put((client, self._load(call)))
            self._wake()

    def _load(self, call: LoadLora) -> ServerMessage:
        assert self._shelf is not None, "an engine without adapters began to load one"
        try:
            return LoraAdapters(call.call, [self._shelf.load(call.name, call.path)])
        except EngineCoreError as error:
            return CallFailed(call.call, ErrorCode.INVALID_ARGUMENT, str(error))
        except Exception as error:  # only this call fails; the engine continues
            log.say(traceback.format_exc())
            text = f"the adapter could not be loaded: {type(error).__name__}: {error}"
            return CallFailed(call.call, ErrorCode.INTERNAL, text)
