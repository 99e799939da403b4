"""How frames travel between a client and its engine: the Transport a client is given, and the one over ZeroMQ.

The ZeroMQ socket belongs to an IO thread of its own, which polls it together with the engine's pidfd (a socket alone
would stay silent for ever when the engine dies), the socket's monitor (for engines of other owners) and an eventfd by
which other threads wake it.
"""

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from ipc.errors import RequestFailedError
from ipc.sockets import Context, check_listening, connect_dealer

OnFrames = Callable[[list[bytes]], None]
OnDead = Callable[[str], None]
OnLost = Callable[[], bytes]

#: Frames handed over at once; a reader that falls behind still comes to its other file descriptors.
_MAX_BATCH = 256
#: Bytes that may wait for an engine that does not read, then submitting fails.
MAX_QUEUED_BYTES = 64 << 20
#: Seconds that last frames of a dead engine, or to a living one, are waited for.
_LAST_FRAMES_S = 0.2
#: Seconds between two attempts to make a lost connection again.
_RETRY_S = 0.02

_log = logging.getLogger(__name__)


class _Connection(NamedTuple):
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]

    def close(self, linger_s: float) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=int(linger_s * 1000))


def _connect(context: Context, address: str) -> _Connection:
    """Errors: AddressError."""
    socket = connect_dealer(context, address)
    return _Connection(socket, socket.get_monitor_socket(zmq.EVENT_DISCONNECTED))


class Transport(Protocol):
    """Carries frames. The callbacks are called by one thread at a time; on_dead at most once, then nothing.

    on_lost: the connection was cut and is made again; what was not received is lost. Returns the first frame for the
    new one. A transport that does not connect again calls on_dead instead.
    """

    def start(self, on_frames: OnFrames, on_dead: OnDead, on_lost: OnLost) -> None: ...

    def send(self, frame: bytes) -> None:
        """Queue a frame; never blocks. Called by one thread at a time, not after close().

        Errors: RequestFailedError when the queue is full. Dropped when the engine is gone.
        """

    def keep_alive(self, frame: bytes, seconds: float) -> None:
        """Send this frame whenever nothing else was sent for so long; 0 = never. Called from on_frames."""

    def close(self) -> None:
        """Send what is queued, for a short while, and end; on_frames and on_dead are not called afterwards."""


class ZmqTransport:
    """A DEALER socket to one engine.

    address: of the engine. grace: seconds in which a tcp connection that was cut may be made again (an engine on ipc
    or of this process that closes the connection is gone). pidfd: readable once the engine process is dead (not closed
    here), None for an engine of another owner. describe_exit: how that process ended, in words.
    """

    def __init__(
        self,
        address: str,
        *,
        pidfd: int | None = None,
        describe_exit: Callable[[], str] | None = None,
        grace: float = 2.0,
    ) -> None:
        self._address = address
        self._grace = grace if pidfd is None and address.startswith("tcp://") else 0.0
        self._lost_at: float | None = None  # monotonic; None while connected
        self._heartbeat = b""
        self._heartbeat_s = 0.0  # 0 = none
        self._sent_at = 0.0  # monotonic
        self._pidfd = pidfd
        self._describe_exit = describe_exit
        # There is no lock: a finalizer that runs in the middle of send() may close this.
        self._queue: deque[bytes] = deque()
        self._bytes_queued = 0  # in total; written by senders only
        self._bytes_sent = 0  # in total; written by the thread only
        self._closed = False
        self._wake_fd = -1
        self._close_wake_fd: weakref.finalize[[int], ZmqTransport] | None = None
        self._thread: threading.Thread | None = None

    def start(self, on_frames: OnFrames, on_dead: OnDead, on_lost: OnLost) -> None:
        """Errors: AddressError; EngineDeadError when nothing listens at the address."""
        check_listening(self._address)
        context = zmq.Context()
        try:
            connection = _connect(context, self._address)
        except BaseException:
            context.term()
            raise
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._close_wake_fd = weakref.finalize(self, os.close, self._wake_fd)
        arguments = (context, connection, on_frames, on_dead, on_lost)
        self._thread = threading.Thread(target=self._run, args=arguments, name="engine-client-io", daemon=True)
        self._thread.start()

    def send(self, frame: bytes) -> None:
        if self._closed:
            return
        waiting = self._bytes_queued - self._bytes_sent
        if waiting + len(frame) > MAX_QUEUED_BYTES:
            raise RequestFailedError(
                f"the engine at {self._address} does not read: {waiting} bytes wait to be sent, the limit is "
                f"{MAX_QUEUED_BYTES}; submit fewer requests at once"
            )
        self._queue.append(frame)
        self._bytes_queued += len(frame)
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        self._closed = True
        if self._thread is None or self._close_wake_fd is None or not self._close_wake_fd.alive:
            return
        os.eventfd_write(self._wake_fd, 1)
        if self._thread is not threading.current_thread():
            self._thread.join()
            self._close_wake_fd()

    def keep_alive(self, frame: bytes, seconds: float) -> None:
        self._heartbeat, self._heartbeat_s, self._sent_at = frame, seconds, time.monotonic()

    def _run(
        self, context: Context, connection: _Connection, on_frames: OnFrames, on_dead: OnDead, on_lost: OnLost
    ) -> None:
        try:
            while (reason := self._serve(connection, on_frames)) is None:
                connection.close(linger_s=0.0)
                if self._lost_at is not None:
                    time.sleep(_RETRY_S)  # whoever accepts connections in the engine's place has closed this one too
                connection = _connect(context, self._address)
                self._begin_again(on_lost())
        except Exception as error:  # the thread's entry: its silent death would leave every caller waiting
            _log.exception("the IO thread of the client of %s failed", self._address)
            reason = f"the client's IO thread failed: {type(error).__name__}: {error}"
        asked, self._closed = self._closed, True
        connection.close(linger_s=0.0 if reason else _LAST_FRAMES_S)
        context.term()
        if reason and not asked:
            on_dead(reason)

    def _begin_again(self, hello: bytes) -> None:
        """What was queued is the old connection's: all of it that still matters follows the answer to this Hello."""
        if self._lost_at is None:
            self._lost_at = time.monotonic()
        self._heartbeat_s = 0.0  # until the next session says otherwise
        while self._queue:
            self._bytes_sent += len(self._queue.popleft())
        self._queue.append(hello)
        self._bytes_sent -= len(hello)

    def _serve(self, connection: _Connection, on_frames: OnFrames) -> str | None:
        """Carry frames until close (returns ""), until the engine is gone (returns how), or until the connection is
        lost and may be made again (returns None)."""
        socket, monitor = connection.socket, connection.monitor
        poller = zmq.Poller()
        for readable in (socket, monitor, self._wake_fd, *([] if self._pidfd is None else [self._pidfd])):
            poller.register(readable, zmq.POLLIN)
        poller.modify(socket, zmq.POLLIN if self._flush(socket) else zmq.POLLIN | zmq.POLLOUT)
        while True:
            ready: dict[Any, int] = dict(poller.poll(self._poll_ms()))
            if socket in ready and (frames := _receive(socket)):
                self._lost_at = None
                on_frames(frames)
            if self._pidfd in ready:
                self._receive_last(socket, monitor, on_frames)
                return self._describe_exit() if self._describe_exit is not None else "the engine process has ended"
            if monitor in ready:
                recv_monitor_message(monitor)
                self._receive_last(socket, monitor, on_frames, wait_s=0.0)
                if self._grace > 0.0 and not self._closed:
                    return None
                return self._describe_disconnect()
            if self._lost_at is not None and time.monotonic() - self._lost_at > self._grace:
                return f"{self._describe_disconnect()} and did not answer again within {self._grace:g} s"
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            self._send_heartbeat(socket)
            all_sent = self._flush(socket)
            if self._closed:
                if not all_sent and socket.poll(int(_LAST_FRAMES_S * 1000), zmq.POLLOUT):
                    self._flush(socket)
                return ""
            poller.modify(socket, zmq.POLLIN if all_sent else zmq.POLLIN | zmq.POLLOUT)

    def _poll_ms(self) -> int | None:
        """Until the next heartbeat is due or the grace is over; None = until something happens."""
        now, due = time.monotonic(), []
        if self._heartbeat_s > 0.0:
            due.append(self._sent_at + self._heartbeat_s - now)
        if self._lost_at is not None:
            due.append(self._lost_at + self._grace - now)
        return max(0, int(min(due) * 1000) + 1) if due else None

    def _send_heartbeat(self, socket: zmq.Socket[bytes]) -> None:
        """If one is due; where the socket takes nothing, there is something on its way."""
        now = time.monotonic()
        if self._heartbeat_s > 0.0 and now - self._sent_at >= self._heartbeat_s:
            self._sent_at = now
            with contextlib.suppress(zmq.Again):
                socket.send(self._heartbeat, zmq.NOBLOCK)

    def _flush(self, socket: zmq.Socket[bytes]) -> bool:
        """Send what is queued; False when the socket takes no more for now."""
        while self._queue:
            try:
                socket.send(self._queue[0], zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._bytes_sent += len(self._queue.popleft())
            self._sent_at = time.monotonic()
        return True

    def _receive_last(
        self,
        socket: zmq.Socket[bytes],
        monitor: zmq.Socket[bytes],
        on_frames: OnFrames,
        wait_s: float = _LAST_FRAMES_S,
    ) -> None:
        """Take what the engine sent before it ended: ZeroMQ reports the disconnect after the last frame."""
        deadline = time.monotonic() + wait_s
        while not monitor.poll(0) and (left := deadline - time.monotonic()) > 0:
            poller = zmq.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(monitor, zmq.POLLIN)
            poller.poll(int(left * 1000) + 1)
            if frames := _receive(socket):
                on_frames(frames)
        while frames := _receive(socket):
            on_frames(frames)

    def _describe_disconnect(self) -> str:
        if self._pidfd is not None and self._describe_exit is not None:
            poller = zmq.Poller()
            poller.register(self._pidfd, zmq.POLLIN)
            if poller.poll(int(_LAST_FRAMES_S * 1000)):
                return self._describe_exit()
        return f"the engine at {self._address} closed the connection"


def _receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    frames: list[bytes] = []
    with contextlib.suppress(zmq.Again):
        while len(frames) < _MAX_BATCH:
            frames.append(socket.recv(zmq.NOBLOCK))
    return frames
