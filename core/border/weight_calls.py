"""WeightCalls: the owner's calls on the weights: a separate thread reads them, then the engine uses them.

A file on the engine's machine is named, and weights never pass through the socket: hundreds of megabytes would hold up
every client's streams, and who may name an adapter's path may name this one too.
"""

import threading
import time
import traceback
from collections.abc import Callable
from enum import Enum
from queue import Empty, SimpleQueue
from typing import Protocol

from core import log
from core.inputs import NewWeights
from ipc.errors import EngineCoreError
from ipc.wire.messages import CallFailed, ErrorCode
from ipc.wire.weights_messages import Sleep, UpdateWeights, WakeUp, WeightsMark

_JOIN_S = 1.0  # seconds that close() waits for the weights being read; then their thread is abandoned
#: Seconds after an update: steps first compute live requests again.
_REST_S = 1.0
_PAUSE_S = 0.005  # between two pieces of work, each of which takes a core from the steps for some milliseconds
_UNSUPPORTED = "this engine's executor cannot change its weights while it runs"


_Asked = tuple[int, UpdateWeights, int]  # client, call and the version of its weights


class _Word(Enum):
    """Other words to the reading thread."""

    LOOK = 1  # there may be work for it now
    REST = 2  # and after the rest too
    CLOSE = 3


class WeightReader(Protocol):
    """The part of UpdatesWeights (core/execution/executor.py) that the border needs."""

    @property
    def why_fixed(self) -> str:
        """Return why this model's weights cannot change; "" if they can."""

    def prepare_weights(self, path: str, version: int) -> WeightsMark:
        """Read other weights. Called by one thread. Errors: those of ipc.errors."""

    @property
    def expects_weights(self) -> bool:
        """Return whether take_memory_ahead() may have something to do."""

    def take_memory_ahead(self) -> bool:
        """Take a piece of the memory for the next weights; return whether there is more. Called by that thread."""

    def pack_second_form(self) -> bool:
        """Pack a further form of a matrix; return whether there is more. Called by that thread. Errors: MemoryError."""


class WeightCalls:
    """One update at a time, from its call until the engine uses it. Call all methods except _run() with the socket's
    lock held.

    executor: None = it cannot change its weights. wake: called by the reading thread when take_done() has something.
    """

    def __init__(self, executor: WeightReader | None, wake: Callable[[], None]) -> None:
        self._executor, self._wake = executor, wake
        self._asked: SimpleQueue[_Asked | _Word] = SimpleQueue()
        self._done: SimpleQueue[tuple[int, NewWeights | CallFailed]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_busy = False
        #: The weights in use; None = those that the engine started with.
        self.mark: WeightsMark | None = None
        if executor is not None and executor.expects_weights:
            self._start(executor)

    def refusal(self, call: Sleep | WakeUp) -> CallFailed | None:
        """Return why the engine cannot sleep; None: it can."""
        reason = ""
        if self._executor is None:
            reason = "this engine's executor cannot free its memory while it runs"
        elif isinstance(call, Sleep) and call.level not in (1, 2):
            reason = f"level must be 1 (without the KV cache) or 2 (without the weights too); got {call.level}"
        elif isinstance(call, Sleep) and call.level > 1 and self._executor.why_fixed:
            reason = f"level 2 frees the weights, and this engine cannot get them again: {self._executor.why_fixed}"
        return CallFailed(call.call, ErrorCode.INVALID_ARGUMENT, reason) if reason else None

    def begin(self, client: int, call: UpdateWeights) -> CallFailed | None:
        """Start to read weights, or return why not. take_done() has what follows."""
        if self._executor is None:
            return CallFailed(call.call, ErrorCode.INVALID_ARGUMENT, _UNSUPPORTED)
        if self._is_busy:
            text = "another update of the weights has not finished; call again after its answer"
            return CallFailed(call.call, ErrorCode.RESOURCE_EXHAUSTED, text)
        if self._thread is None:
            self._start(self._executor)
        self._is_busy = True
        self._asked.put((client, call, 1 + (0 if self.mark is None else self.mark.version)))
        return None

    def take_done(self) -> list[tuple[int, NewWeights | CallFailed]]:
        """Return (client, message): an input for the engine, or an answer to the client."""
        done = [self._done.get_nowait() for _ in range(self._done.qsize())]
        self._is_busy &= not any(isinstance(message, CallFailed) for _, message in done)
        return done

    def end(self, mark: WeightsMark) -> bool:
        """Note that the engine uses these weights; return whether it did not before."""
        if mark.version == (0 if self.mark is None else self.mark.version):
            return False
        self.mark, self._is_busy = mark, False
        self._asked.put(_Word.REST)
        return True

    def note_done(self) -> None:
        """Note that the engine has done a call: perhaps it has woken up."""
        if self._thread is not None:
            self._asked.put(_Word.LOOK)

    def _start(self, executor: WeightReader) -> None:
        self._thread = threading.Thread(target=self._run, args=(executor,), name="weights", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread after the weights that are being read."""
        if self._thread is not None:
            self._asked.put(_Word.CLOSE)
            self._thread.join(_JOIN_S)

    # --- the reading thread ---

    def _run(self, executor: WeightReader) -> None:
        rest_s = 0.0
        while not isinstance(asked := self._next(executor, time.monotonic() + rest_s), _Word):
            rest_s = _REST_S
            client, call, version = asked
            self._done.put((client, self._read(executor, call, version)))
            self._wake()

    def _next(self, executor: WeightReader, work_at: float | None) -> _Asked | _Word:
        """Return the next call, or CLOSE. Until it comes, other work is done from this time on, piece by piece."""
        while True:
            try:
                asked = self._asked.get(timeout=None if work_at is None else max(0.0, work_at - time.monotonic()))
            except Empty:
                work_at = time.monotonic() + _PAUSE_S if self._works_ahead(executor) else None
            else:
                if asked is _Word.REST:
                    work_at = time.monotonic() + _REST_S
                elif asked is not _Word.LOOK:
                    return asked
                elif work_at is None:  # a rest is not cut short, nor begun again: any client's calls say this
                    work_at = time.monotonic()

    def _works_ahead(self, executor: WeightReader) -> bool:
        """Do a piece of what calls do not wait for, and return whether there is more.

        Forms come before memory: they have a place already, and only with them is known how much the next weights need.
        """
        works = {
            "matrices stay in one form, which is slower": executor.pack_second_form,
            "no memory is taken for the next weights": executor.take_memory_ahead,
        }
        for loss, work in works.items():
            try:
                if work():
                    return True
            except (OSError, MemoryError) as error:  # calls are answered without it
                log.say(f"engine-core: {loss}: {type(error).__name__}: {error}")
        return False

    def _read(self, executor: WeightReader, call: UpdateWeights, version: int) -> NewWeights | CallFailed:
        try:
            return NewWeights(call.call, executor.prepare_weights(call.path, version), call.mode)
        except EngineCoreError as error:
            return CallFailed(call.call, ErrorCode.INVALID_ARGUMENT, str(error))
        except Exception as error:  # only this call fails; the engine continues with the weights that it has
            log.say(traceback.format_exc())
            text = f"the weights could not be read: {type(error).__name__}: {error}"
            return CallFailed(call.call, ErrorCode.INTERNAL, text)
