"""EngineClient: one session with an engine. It submits requests, feeds the journal, and answers typed calls.

Threads: any may submit, wait, read and call. What arrives is applied by the transport's thread, which wakes waiting
threads and listeners once per received batch, and only for news that a consumer waits for (a finish, or tokens of a
streaming request). Messages to the engine are encoded by the calling thread.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from msgspec.structs import replace

from frontend.client.call_client import LOST, CallClient
from frontend.client.journal import Journal
from frontend.client.kv_event_stream import KVEventStream
from frontend.client.news import News
from frontend.client.progress import Progress
from frontend.client.resumption import Resumption
from frontend.client.transport_interface import Borrower, Transport
from ipc.errors import (
    DeadlineExceededError,
    EngineCoreError,
    EngineDeadError,
    HandshakeError,
    InvalidRequestError,
    RequestFailedError,
)
from ipc.params.pooling_params import PoolingParams
from ipc.params.sampling_params import SamplingParams
from ipc.tables.arrays import Ints
from ipc.wire.feature_messages import parts_of
from ipc.wire.lora_messages import AdapterId
from ipc.wire.messages import (
    MAX_ABORTED,
    Abort,
    AddRequest,
    ErrorCode,
    Outputs,
    RequestFailed,
    ServerMessage,
    Submission,
    encode,
)
from ipc.wire.pin_messages import Pin, Pinned
from ipc.wire.placed_feature import PlacedFeature
from ipc.wire.pooling_messages import AddPooling
from ipc.wire.scheduling_messages import FollowKVEvents, KVEvents

# JournalReader: what consumers read about a client's requests, under the lock of the journal.


class JournalReader(Protocol):
    """The reading methods of EngineClient, which owns the fields."""

    _changed: threading.Condition
    _journal: Journal
    _clock: Callable[[], float]

    def raise_if_ended(self) -> None:
        """Raise the error that ended the session, if any."""

    def _check_process(self) -> None:
        """Raise in a forked child."""

    def wait(self, numbers: Ints, timeout: float | None = None) -> Ints:
        """Wait until some of `numbers` (int64) have news and return these; empty after `timeout` seconds.

        Errors: EngineDeadError if the session has ended and none of them has news left.
        """
        self._check_process()
        end = None if timeout is None else self._clock() + timeout
        with self._changed:
            while not len(ready := self._journal.take_ready(numbers)):
                self.raise_if_ended()
                left = None if end is None else end - self._clock()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            return ready

    def take_ready(self) -> Ints:
        """Return the numbers of all requests with news that has not been taken, for listeners."""
        with self._changed:
            return self._journal.take_ready()

    def take_news(self) -> News:
        """Return new tokens and ends as columns, except of requests on hold; see Journal.take_news().

        For a listener that serves many requests; do not combine it with take_ready().
        """
        with self._changed:
            return self._journal.take_news()

    def hold(self, number: int, held: bool) -> int:
        """Hold a live request's news in the journal, or stop that; return how many of its tokens were not taken."""
        with self._changed:
            return self._journal.hold(number, held)

    def read(self, number: int, start: int = 0, choice: int = 0) -> Progress:
        """Return the progress of a choice of a request, with its tokens from output position `start`."""
        with self._changed:
            return self._journal.read(number, start, choice)


_MAX_NUMBER = 2**32 - 1


class EngineClient(CallClient, JournalReader):
    """A CallClient that submits requests.

    After a loss the transport may connect to this engine again, or to another with the same model at level L2:
    unfinished requests are submitted again with their tokens, so none is lost or different.
    """

    def __init__(self, transport: Transport, **options: Any) -> None:
        """options: those of CallClient."""
        self._submitting = threading.RLock()  # keeps numbers in order on the wire; taken before _changed
        self._journal = Journal()
        self._resumption = Resumption(self._journal)
        self._next_number = 0
        self._listeners: list[Callable[[], None]] = []
        self._kv_events: KVEventStream | None = None
        super().__init__(transport, **options)

    # --- requests -----------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | PoolingParams,
        *,
        seed: int | Callable[[int], int],
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        deadline_ms: int = 0,
        streaming: bool = False,
        second_from: int = 0,
        adapter: AdapterId | None = None,
        features: Sequence[PlacedFeature] = (),
        pins: Sequence[Pin] = (),
    ) -> int:
        """Submit a request and return its number; it stays in the journal until discard(). The type of its params
        decides whether it asks for tokens or for vectors (then the seed does not matter).

        seed: uint64, or a function of the number. streaming: wake consumers for its tokens too. second_from: see
        AddPooling. adapter: a loaded one. features: features that replace tokens of the prompt, in order. pins: what
        the engine should keep of a prompt for tokens. Errors: InvalidRequestError if the message is too long for the
        engine; RequestFailedError if too much waits to be sent.
        """
        self._check()
        prompt = np.asarray(prompt_token_ids, "<i4").tobytes()
        with self._submitting:
            number = self._next_number
            assert number <= _MAX_NUMBER, number
            if isinstance(params, PoolingParams):
                request: Submission = AddPooling(
                    number, prompt, params, priority, deadline_ms, cache_salt, tenant, second_from, adapter
                )
            else:
                key = seed if isinstance(seed, int) else seed(number)
                request = AddRequest(
                    number, prompt, params, key, priority, deadline_ms, cache_salt, tenant=tenant, adapter=adapter
                )
                if pins:
                    request = replace(request, pins=tuple(pins))
            if features:
                request = replace(request, features=[one.use for one in features])
            frame = self._frame_of(request)
            with self._changed:
                self.raise_if_ended()
                if not self._is_connected and self._resumption.is_full(self.welcome.limits):
                    raise RequestFailedError(f"{LOST}; as many requests wait for it as it accepts")
                self._next_number = number + 1
                puts = [one.feature for one in features]
                self._journal.add(request, streaming=streaming, now=self._clock(), puts=puts)
                try:
                    self._send(*(encode(part) for put in puts for part in parts_of(put)), frame)
                except BaseException:
                    self._journal.remove(number)
                    raise
        return number

    def _frame_of(self, request: Submission) -> bytes:
        frame, most = encode(request), self.welcome.limits.max_message_bytes
        if len(frame) > most:
            size = len(request.prompt_token_ids)
            raise InvalidRequestError(
                f"a request of {len(frame)} bytes (prompt: {size}) is too long; the engine accepts {most}"
            )
        return frame

    def abort(self, numbers: Iterable[int], choices: Sequence[int] = ()) -> None:
        """Abort requests, or only the given choice of each; what still runs finishes with ABORT."""
        self._check()
        column, beside = np.fromiter(numbers, "<u4"), np.array(choices, "<u2")
        with self._changed:
            self._journal.mark_aborted(column.tolist(), choices)
            for at in range(0, len(column), MAX_ABORTED):
                part = slice(at, at + MAX_ABORTED)
                self._send(encode(Abort(column[part].tobytes(), beside[part].tobytes())))

    def discard(self, numbers: Iterable[int]) -> None:
        """Remove requests and abort those that run; late outputs are dropped. Does not raise for a dead engine."""
        if os.getpid() != self._pid:
            return  # a thread of the parent process may hold the lock
        with self._changed:
            running = [number for number in numbers if self._journal.remove(number)]
        if not running:
            return
        with contextlib.suppress(EngineDeadError, HandshakeError):
            self.abort(running)

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` from the transport's thread once per batch with news, and when the session ends."""
        with self._changed:
            self._listeners.append(listener)

    def lend(self, borrower: Borrower | None) -> None:
        """Let an event loop receive instead of the transport's thread, until lend(None): which saves one hop a step.

        The caller must not wait for an answer in that loop.
        """
        self._transport.lend(borrower)

    def receive(self) -> bool:
        """Receive, as the borrower; return whether there is more."""
        return self._transport.receive()

    @property
    def num_live(self) -> int:
        """Return the number of requests submitted and not discarded."""
        return self._journal.num_live

    def follow_kv_events(self) -> KVEventStream:
        """Return the stream of the prefix cache's content and every change; an earlier stream is closed."""
        if self._kv_events is not None:
            self._kv_events.close()
        stream = self._kv_events = KVEventStream(self)
        try:
            self.begin_kv_events()
        except BaseException:
            self._kv_events = None
            raise
        return stream

    # --- the transport's thread ---------------------------------------------------------------------------------

    def _apply(self, message: ServerMessage, now: float) -> bool:
        match message:
            case Outputs():
                if message.epoch != self.welcome.epoch:
                    return False
                return self._journal.any_ready(self._journal.apply(message, now))
            case RequestFailed():
                return self._journal.fail(message.number, request_error(message), now)
            case Pinned():
                self._journal.note_pins(message.number, message.pins)
                return False
            case KVEvents():
                if self._kv_events is not None:
                    self._kv_events.put(message)
                return False
            case _:
                return super()._apply(message, now)

    def _continue(self, now: float) -> bool:
        if self._kv_events is not None and self._kv_events.is_open:
            self._transport.send(encode(FollowKVEvents(next(self._call_numbers))))
        return self._resumption.submit_again(self._transport.send, self.welcome.limits, now)

    def _num_unfinished(self) -> int:
        return len(self._journal.unfinished())

    def _notify_listeners(self) -> None:
        for listener in self._listeners:
            listener()
        if self._error is not None and self._kv_events is not None:
            self._kv_events.wake()


def request_error(failed: RequestFailed) -> EngineCoreError:
    """Return the error of a request that the engine failed.

    It is an InvalidRequestError, a DeadlineExceededError or another RequestFailedError.
    """
    if failed.code == ErrorCode.INVALID_ARGUMENT:
        return InvalidRequestError(failed.message)
    kind = DeadlineExceededError if failed.code == ErrorCode.DEADLINE_EXCEEDED else RequestFailedError
    error = kind(f"{failed.message} ({ErrorCode(failed.code).name})")
    error.code, error.retry_after_ms = ErrorCode(failed.code).name, failed.retry_after_ms
    return error
