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
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from ipc.errors import RequestFailedError
from ipc.sockets import connect_dealer

OnFrames = Callable[[list[bytes]], None]
OnDead = Callable[[str], None]

#: Frames handed over at once; a reader that falls behind still comes to its other file descriptors.
_MAX_BATCH = 256
#: Bytes that may wait for an engine that does not read, then submitting fails.
MAX_QUEUED_BYTES = 64 << 20
#: Seconds that last frames of a dead engine, or to a living one, are waited for.
_LAST_FRAMES_S = 0.2

_log = logging.getLogger(__name__)


class Transport(Protocol):
    """Carries frames. on_frames and on_dead are called by one thread at a time; on_dead at most once, then nothing."""

    def start(self, on_frames: OnFrames, on_dead: OnDead) -> None: ...

    def send(self, frame: bytes) -> None:
        """Queue a frame; never blocks. Errors: RequestFailedError when the queue is full. Dropped after the end."""

    def close(self) -> None:
        """Send what is queued, for a short while, and end; on_frames and on_dead are not called afterwards."""


class ZmqTransport:
    """A DEALER socket to one engine.

    address: of the engine. pidfd: readable once the engine process is dead (not closed here), None for an engine of
    another owner. describe_exit: how that process ended, in words.
    """

    def __init__(
        self, address: str, *, pidfd: int | None = None, describe_exit: Callable[[], str] | None = None
    ) -> None:
        self._address = address
        self._pidfd = pidfd
        self._describe_exit = describe_exit
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._closed = False
        self._lock = threading.RLock()  # of the queue, the eventfd and _closed; a finalizer may run under it
        self._wake_fd = -1
        self._thread: threading.Thread | None = None

    def start(self, on_frames: OnFrames, on_dead: OnDead) -> None:
        """Errors: AddressError."""
        context = zmq.Context()
        try:
            socket = connect_dealer(context, self._address)
        except BaseException:
            context.term()
            raise
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        arguments = (context, socket, monitor, on_frames, on_dead)
        self._thread = threading.Thread(target=self._run, args=arguments, name="engine-client-io", daemon=True)
        self._thread.start()

    def send(self, frame: bytes) -> None:
        with self._lock:
            if self._closed:
                return
            if self._queued_bytes + len(frame) > MAX_QUEUED_BYTES:
                raise RequestFailedError(
                    f"the engine at {self._address} does not read: {self._queued_bytes} bytes wait to be sent, the "
                    f"limit is {MAX_QUEUED_BYTES}; submit fewer requests at once"
                )
            self._queue.append(frame)
            self._queued_bytes += len(frame)
            os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        with self._lock:
            first = not self._closed and self._wake_fd >= 0
            self._closed = True
            if first:
                os.eventfd_write(self._wake_fd, 1)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        monitor: zmq.Socket[bytes],
        on_frames: OnFrames,
        on_dead: OnDead,
    ) -> None:
        try:
            reason = self._serve(socket, monitor, on_frames)
        except Exception as error:  # the thread's entry: its silent death would leave every caller waiting
            _log.exception("the IO thread of the client of %s failed", self._address)
            reason = f"the client's IO thread failed: {type(error).__name__}: {error}"
        with self._lock:
            asked = self._closed
            self._closed = True
            os.close(self._wake_fd)
            self._wake_fd = -1
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close(linger=0 if reason else int(_LAST_FRAMES_S * 1000))
        context.term()
        if reason and not asked:
            on_dead(reason)

    def _serve(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], on_frames: OnFrames) -> str:
        """Carry frames until close (returns "") or until the engine is gone (returns how)."""
        poller = zmq.Poller()
        for readable in (socket, monitor, self._wake_fd, *([] if self._pidfd is None else [self._pidfd])):
            poller.register(readable, zmq.POLLIN)
        while True:
            ready: dict[Any, int] = dict(poller.poll())
            if socket in ready and (frames := _receive(socket)):
                on_frames(frames)
            if self._pidfd in ready:
                self._receive_last(socket, monitor, on_frames)
                return self._describe_exit() if self._describe_exit is not None else "the engine process has ended"
            if monitor in ready:
                recv_monitor_message(monitor)
                self._receive_last(socket, monitor, on_frames, wait_s=0.0)
                return self._describe_disconnect()
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            all_sent = self._flush(socket)
            if self._closed:
                if not all_sent and socket.poll(int(_LAST_FRAMES_S * 1000), zmq.POLLOUT):
                    self._flush(socket)
                return ""
            poller.modify(socket, zmq.POLLIN if all_sent else zmq.POLLIN | zmq.POLLOUT)

    def _flush(self, socket: zmq.Socket[bytes]) -> bool:
        """Send what is queued; False when the socket takes no more for now."""
        while self._queue:
            try:
                socket.send(self._queue[0], zmq.NOBLOCK)
            except zmq.Again:
                return False
            with self._lock:
                self._queued_bytes -= len(self._queue.popleft())
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
