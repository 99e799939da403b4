"""CallClient: one session with an engine that makes calls. EngineClient adds requests to it.

A command that only makes calls needs this file without EngineClient: NumPy, which requests need, is half of what a
command imports.

Threads: any may call. What arrives is applied by the transport's thread. Messages to the engine are encoded by the
calling thread.
"""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from msgspec.structs import replace

from frontend.client.transport_interface import Transport
from frontend.client.typed_calls import TypedCalls
from frontend.client.weight_marks import WeightMarks
from ipc.errors import CallFailedError, EngineCoreError, EngineDeadError, HandshakeError, RequestFailedError
from ipc.wire.call import Call
from ipc.wire.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
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
    Welcome,
    decode_server_message,
    encode,
)
from ipc.wire.pin_messages import Pinned
from ipc.wire.scheduling_messages import KVEvents
from ipc.wire.sockets import HANDSHAKE_MS
from ipc.wire.weights_messages import Weights

LOST = "the connection to the engine was lost and is being restored; try again"


class CallClient(TypedCalls):
    """A session over a transport, open when the constructor returns.

    hello_timeout, call_timeout: seconds after which an engine that does not answer is an error. owner_token: only the
    engine's owner has it; needed to pause, resume, drain and shut down. clock: monotonic seconds. Errors:
    HandshakeError naming both versions, EngineDeadError if no engine answers; every method but close() raises
    EngineDeadError once the engine or the session has ended, and EngineCoreError in a forked child.
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
        self._hello = Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, name or f"pid {self._pid}", b"", owner_token)
        self._calls: dict[int, Future[CallResult]] = {}
        self._call_numbers = itertools.count(1)
        self._marks = WeightMarks()
        self._error: EngineCoreError | None = None
        self._welcome: Future[Welcome] = Future()
        begin = time.monotonic()
        transport.start(self._on_frames, self._on_dead, self._on_lost)
        try:
            transport.send(encode(self._hello))
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
                    raise CallFailedError(f"{name}: {LOST}")
                self._calls[number] = future
                self._send(encode(message))
            return future.result(limit)
        except FutureTimeoutError:
            raise CallFailedError(f"the engine did not answer {name} within {limit:g} s") from None
        finally:
            with self._changed:
                self._calls.pop(number, None)

    def _send(self, *frames: bytes) -> None:
        """Send frames, under the lock. Without a connection they are dropped: the next one gets what it needs from
        _continue().
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
            case Outputs() | RequestFailed() | Pinned() | KVEvents():
                return False  # see EngineClient
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
        self._hello = replace(self._hello, session_token=welcome.session_token, num_resumed=0)
        self._transport.keep_alive(encode(Heartbeat()), welcome.limits.heartbeat_ms / 1000)
        self._transport.await_return(welcome.limits.resume_ms / 1000)
        if is_first:
            self._welcome.set_result(welcome)
            return False
        return self._continue(now)

    def _continue(self, now: float) -> bool:
        """Continue in the next session what the last one had begun; return whether a waiting consumer has news."""
        return False

    def _num_unfinished(self) -> int:
        """Return the number of requests that the next session will get again. No bound of the engine refuses them."""
        return 0

    def _on_lost(self) -> bytes:
        """Handle the loss of the connection; return the first frame for the next one. Calls are not repeated."""
        with self._changed:
            if self._is_connected:
                self._hello = replace(self._hello, num_resumed=self._num_unfinished())
            self._is_connected = False
            calls, self._calls = self._calls, {}
            for future in calls.values():
                future.set_exception(CallFailedError(LOST))
            return encode(self._hello)

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
        """Tell all who listen that there is news, or that the session has ended. Called without the lock."""


# The client's errors for refusals of the engine.


_SAME_TOKENS = "L2"  # the level at which equal fingerprints mean equal tokens


def fresh(error: EngineCoreError) -> EngineCoreError:
    """Return an equal error, because an error raised by several threads would collect their tracebacks."""
    return type(error)(*error.args)


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
