"""EngineClient: one session with an engine. It submits requests, feeds the journal, and answers typed calls.

Threads: any may submit, wait, read and call. What arrives is applied by the transport's thread, which wakes waiting
threads and listeners once per received batch, and only for news that a consumer waits for (a finish, or tokens of a
streaming request). Messages to the engine are encoded by the calling thread.
"""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Protocol

import numpy as np
from msgspec.structs import replace

from frontend.client.journal import Journal
from frontend.client.kv_event_stream import KVEventStream
from frontend.client.news import News
from frontend.client.progress import Progress
from frontend.client.resumption import Resumption
from frontend.client.transport_interface import Borrower, Transport
from frontend.client.typed_calls import TypedCalls
from frontend.client.weight_marks import WeightMarks
from ipc.errors import (
    CallFailedError,
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
from ipc.wire.call import Call
from ipc.wire.feature_messages import parts_of
from ipc.wire.lora_messages import AdapterId
from ipc.wire.messages import (
    MAX_ABORTED,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Abort,
    AddRequest,
    CallResult,
    EngineStopping,
    ErrorCode,
    Goodbye,
    Heartbeat,
    Hello,
    Outputs,
    Refused,
    RequestFailed,
    ServerMessage,
    Submission,
    Welcome,
    decode_server_message,
    encode,
)
from ipc.wire.pin_messages import Pin, Pinned
from ipc.wire.placed_feature import PlacedFeature
from ipc.wire.pooling_messages import AddPooling
from ipc.wire.scheduling_messages import FollowKVEvents, KVEvents
from ipc.wire.sockets import HANDSHAKE_MS
from ipc.wire.weights_messages import Weights

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
_LOST = "the connection to the engine was lost and is being restored; try again"


class EngineClient(JournalReader, TypedCalls):
    """A session over a transport, open when the constructor returns.

    hello_timeout, call_timeout: seconds after which an engine that does not answer is an error. owner_token: only the
    engine's owner has it; needed to pause, resume, drain and shut down. clock: monotonic seconds. After a loss the
    transport may connect to this engine again, or to another with the same model at level L2: unfinished requests are
    submitted again with their tokens, so none is lost or different. Errors: HandshakeError naming both versions,
    EngineDeadError if no engine answers; every method but close() raises EngineDeadError once the engine or the session
    has ended, and EngineCoreError in a forked child.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        name: str = "",
        owner_token: bytes = b"",
        hello_timeout: float = 10.0,
        call_timeout: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport, self._clock = transport, clock
        self._call_timeout = call_timeout
        self._pid = os.getpid()
        self._is_connected = False  # the present connection's Hello was answered
        self._changed = threading.Condition()  # owns all below; taken before the transport's lock
        self._submitting = threading.RLock()  # keeps numbers in order on the wire; taken before _changed
        self._journal = Journal()
        hello = Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, name or f"pid {self._pid}", b"", owner_token)
        self._resumption = Resumption(hello, self._journal)
        self._next_number = 0
        self._calls: dict[int, Future[CallResult]] = {}
        self._call_numbers = itertools.count(1)
        self._listeners: list[Callable[[], None]] = []
        self._kv_events: KVEventStream | None = None
        self._marks = WeightMarks()
        self._error: EngineCoreError | None = None
        self._welcome: Future[Welcome] = Future()
        begin = time.monotonic()
        transport.start(self._on_frames, self._on_dead, self._on_lost)
        try:
            transport.send(self._resumption.hello)
            self.welcome = self._welcome.result(hello_timeout)
        except FutureTimeoutError:
            transport.close()
            raise EngineDeadError(
                f"no engine answered within {hello_timeout:g} s; is one running at this address? An engine with keys "
                "answers only the clients that it allows"
            ) from None
        except EngineDeadError as error:
            transport.close()
            raise unanswered(error, time.monotonic() - begin) from None
        except BaseException:
            transport.close()
            raise

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
                if features or pins:
                    request = replace(request, features=[one.use for one in features], pins=tuple(pins))
            frame = self._frame_of(request)
            with self._changed:
                self.raise_if_ended()
                if not self._is_connected and self._resumption.is_full(self.welcome.limits):
                    raise RequestFailedError(f"{_LOST}; as many requests wait for it as it accepts")
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
    def error(self) -> EngineCoreError | None:
        """Return the reason why the session has ended; None while it is open."""
        return self._error

    @property
    def is_connected(self) -> bool:
        """Return whether an engine has answered on the present connection; False while the next one is awaited."""
        return self._is_connected

    def raise_if_ended(self) -> None:
        """Raise the error that ended the session, if any."""
        if self._error is not None:
            raise fresh(self._error)

    @property
    def weights_version(self) -> int:
        """Return the version of the weights that the engine computes with, as far as this client knows."""
        return self._marks.version

    def welcome_of(self, weights_version: int) -> Welcome:
        """Return the engine's Welcome as it would be with these weights; see WeightMarks.apply()."""
        return self._marks.apply(self.welcome, weights_version)

    @property
    def num_live(self) -> int:
        """Return the number of requests submitted and not discarded."""
        return self._journal.num_live

    def close(self) -> None:
        """End the session. Threads that wait get EngineDeadError; a second call does nothing."""
        if os.getpid() != self._pid:
            return
        with self._changed, contextlib.suppress(RequestFailedError):  # it does not read; it will notice the end
            if self._error is None:
                self._send(encode(Goodbye()))
        self._end(EngineDeadError("this client was closed"))
        self._transport.close()

    def call(self, make: Callable[[int], Call], name: str, timeout: float | None) -> CallResult:
        """Make a call and wait for its answer; timeout: seconds. Errors: CallFailedError, EngineDeadError."""
        self._check()
        limit = self._call_timeout if timeout is None else timeout
        number, future = next(self._call_numbers), Future[CallResult]()
        message = make(number)
        try:
            with self._changed:
                self.raise_if_ended()
                if not self._is_connected:
                    raise CallFailedError(f"{name}: {_LOST}")
                self._calls[number] = future
                self._send(encode(message))
            return future.result(limit)
        except FutureTimeoutError:
            raise CallFailedError(f"the engine did not answer {name} within {limit:g} s") from None
        finally:
            with self._changed:
                self._calls.pop(number, None)

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

    def _send(self, *frames: bytes) -> None:
        """Send frames, under the lock. Without a connection they are dropped: the journal has everything that the next
        one needs.
        """
        if self._is_connected:
            for frame in frames:
                self._transport.send(frame)

    def _check(self) -> None:
        self._check_process()
        self.raise_if_ended()

    def _check_process(self) -> None:
        """Raise in a forked child: socket and thread are the parent's."""
        if os.getpid() != self._pid:
            raise EngineCoreError(
                f"this client belongs to process {self._pid} and was used in {os.getpid()}; make a new one after a fork"
            )

    # --- the transport's thread ---------------------------------------------------------------------------------

    def _on_frames(self, frames: list[bytes]) -> None:
        messages, now = [decode_server_message(frame) for frame in frames], self._clock()
        with self._changed:
            news = False
            for message in messages:
                news |= self._apply(message, now)
            if news:
                self._changed.notify_all()
        if news:
            self._notify_listeners()

    def _on_dead(self, reason: str) -> None:
        self._end(EngineDeadError(reason))

    def _apply(self, message: ServerMessage, now: float) -> bool:
        """Apply one message; return whether a waiting consumer has news."""
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
            case Welcome():
                return self._open(message, now)
            case Refused():
                ended = EngineDeadError(f"the engine ended this session: {message.message}")
                self._end(ended if self._welcome.done() else refusal(message))
                return False
            case EngineStopping(comes_back=True):
                return False  # the connection will be cut, then made with the next engine
            case EngineStopping():
                self._end(EngineDeadError(f"the engine stopped{': ' if message.error else ''}{message.error}"))
                return False
            case _:  # the answer to a call
                answer: CallResult = message
                if isinstance(answer, Weights):
                    self._marks.note(answer.mark)
                if (future := self._calls.pop(answer.call, None)) is not None:
                    future.set_result(answer)
                return False

    def _open(self, welcome: Welcome, now: float) -> bool:
        if self._is_connected:
            return False
        if welcome.major != PROTOCOL_MAJOR:
            self._end(refusal(Refused(ErrorCode.VERSION_MISMATCH, "other protocol", welcome.major, welcome.minor)))
            return False
        is_first = not self._welcome.done()
        if not is_first and (reason := why_not_again(self.welcome, welcome, self.weights_version)):
            self._end(EngineDeadError(f"the engine was restarted while the connection was lost, and {reason}"))
            return False
        self.welcome = welcome
        self._marks.note(welcome.weights)
        self._is_connected = True
        self._resumption.opened(welcome.session_token)
        self._transport.keep_alive(encode(Heartbeat()), welcome.limits.heartbeat_ms / 1000)
        self._transport.await_return(welcome.limits.resume_ms / 1000)
        if is_first:
            self._welcome.set_result(welcome)
            return False
        if self._kv_events is not None and self._kv_events.is_open:
            self._transport.send(encode(FollowKVEvents(next(self._call_numbers))))
        return self._resumption.submit_again(self._transport.send, welcome.limits, now)

    def _on_lost(self) -> bytes:
        """Handle the loss of the connection; return the first frame for the next one. Calls are not repeated."""
        with self._changed:
            if self._is_connected:
                self._resumption.lost()
            self._is_connected = False
            calls, self._calls = self._calls, {}
            for future in calls.values():
                future.set_exception(CallFailedError(_LOST))
            return self._resumption.hello

    def _end(self, error: EngineCoreError) -> None:
        """End the session: waiting requests and calls fail. Only the first reason counts."""
        with self._changed:
            if self._error is not None:
                return
            self._error = error
            calls, self._calls = self._calls, {}
            for future in calls.values():
                future.set_exception(fresh(error))
            if not self._welcome.done():
                self._welcome.set_exception(fresh(error))
            self._changed.notify_all()
        self._notify_listeners()

    def _notify_listeners(self) -> None:
        for listener in self._listeners:
            listener()
        if self._error is not None and self._kv_events is not None:
            self._kv_events.wake()


# The client's errors for refusals of the engine.


_SAME_TOKENS = "L2"  # the level at which equal fingerprints mean equal tokens


def fresh(error: EngineCoreError) -> EngineCoreError:
    """Return an equal error, because an error raised by several threads would collect their tracebacks."""
    return type(error)(*error.args)


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


def unanswered(error: EngineDeadError, seconds: float) -> EngineDeadError:
    """Return the error of a connection that ended this many seconds after it was made, before any message arrived."""
    if seconds < HANDSHAKE_MS / 1000:
        return error
    return EngineDeadError(f"{error}, on which nothing arrived for {seconds:.0f} s: the engine may be stopped")


def refusal(refused: Refused) -> HandshakeError:
    """Return the error of a handshake that the engine refused."""
    return HandshakeError(
        f"the engine refused this client: {refused.message} ({ErrorCode(refused.code).name}; it uses protocol "
        f"{refused.major}.{refused.minor}, this client {PROTOCOL_MAJOR}.{PROTOCOL_MINOR})"
    )


def why_not_again(before: Welcome, now: Welcome, weights_version: int = 0) -> str:
    """Return why requests of the engine `before` cannot continue at the engine that answers `now`; "" if they can.

    weights_version: that of the engine `before`, as far as the client knows.
    """
    if now.engine_id == before.engine_id:
        return ""
    if now.model_fingerprint != before.model_fingerprint:
        return (
            f"another model answers: {now.model_name} ({now.model_fingerprint}), not {before.model_name} "
            f"({before.model_fingerprint}); requests are lost"
        )
    if before.numerics != _SAME_TOKENS or now.numerics != _SAME_TOKENS:
        levels = f"{before.numerics} before and {now.numerics} now"
        return f"its tokens may differ at numerics level {levels} ({_SAME_TOKENS} is needed); requests are lost"
    version = 0 if now.weights is None else now.weights.version
    if version != weights_version:
        return f"it has weights of version {version}, and the last one had {weights_version}; requests are lost"
    lengths = before.limits.max_model_len, now.limits.max_model_len
    if lengths[0] != lengths[1]:  # a request without max_tokens would end at another position
        return (
            f"its max_model_len is {lengths[1]}, not {lengths[0]}: streams may end at another position; requests "
            "are lost"
        )
    return ""
