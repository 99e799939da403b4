"""ZmqTransport: frames between a client and its engine over ZeroMQ.

An IO thread receives. It polls the file descriptors of the socket, of the engine's process (a socket alone stays silent
when the engine dies), of the socket's monitor (for engines of other owners) and of an eventfd. The thread that calls
send() sends the frame itself, which costs less than waking the IO thread. A frame that the socket does not take at once
is queued for the IO thread. An event loop may receive instead of the IO thread, and send the frames of a turn together
(lend()); the IO thread then still handles heartbeats, the end of a connection and the next one.
"""

import contextlib
import errno
import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import zmq

from frontend.client.send_queue import SendQueue
from frontend.client.transport_interface import Borrower, OnDead, OnFrames, OnLost
from ipc.wire.sockets import (
    READABLE,
    WRITABLE,
    Context,
    check_listening,
    connect_dealer,
    pending_events,
    receive_event,
    signal_fd,
)

# Connection: a client's socket to an engine, and the monitor that reports when the engine has closed it.


#: Events of the monitor: what it reports when the two ends do not agree on keys, before it reports the disconnect.
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
#: Most frames received in one batch, so that a slow reader still polls its other file descriptors.
MAX_BATCH = 64
#: Most bytes of a batch, unless its first frame is longer: applying 64 KiB of a step's events takes some 5 ms.
_MAX_BATCH_BYTES = 64 << 10


class Connection(NamedTuple):
    """See the module's docstring."""

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]

    def close(self, linger_s: float) -> None:
        """Close both; linger_s: seconds to send what is queued."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=int(linger_s * 1000))


def connect(context: Context, address: str) -> Connection:
    """Connect a DEALER socket and its monitor. Errors: AddressError."""
    socket = connect_dealer(context, address)
    return Connection(socket, socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _REFUSED))


def receive_batch(socket: zmq.Socket[bytes]) -> tuple[list[bytes], bool]:
    """Return the frames that have arrived, up to MAX_BATCH and _MAX_BATCH_BYTES, and whether there may be more.

    If there are no more, the socket's file descriptor signals the next one.
    """
    frames, size = list[bytes](), 0
    while pending_events(socket) & READABLE:
        if len(frames) == MAX_BATCH or size >= _MAX_BATCH_BYTES:
            return frames, True
        frames.append(socket.recv(zmq.NOBLOCK))
        size += len(frames[-1])
    return frames, False


Locate = Callable[[], str | None]


class _End(Enum):
    """The reason why a connection ended."""

    CLOSED = "from this side"
    PROCESS = "the engine's has ended"
    CONNECTION = "it was cut"
    MOVED = "it was cut, and the engine is at another address"
    GRACE_OVER = "it was cut, and could not be restored"
    GONE = "it was cut, and there is no engine anymore"


_MOST_COLLECTED = 8  # most frames that wait for the end of a borrower's turn, so that the engine gets work during it
#: Seconds to wait for the last frames of a dead engine, or for the last ones to a live engine.
_LAST_FRAMES_S = 0.2
_RETRY_S = 0.02  # between two attempts to reconnect
_LOCATE_S = 0.1  # between two calls of locate() while the engine does not answer

_log = logging.getLogger(__name__)


class ZmqTransport:
    """A DEALER socket to one engine.

    address: the engine's. grace: seconds within which a lost connection may be restored. It applies to tcp, or to any
    address if `locate` is given, and an engine that will be restarted says how long to wait for it. Otherwise an engine
    on ipc or of this process that closes the connection is gone.
    pidfd: readable once the engine process is dead (not closed here); None for an engine that may come back or has
    another owner. describe_exit: return as text how the engine ended. locate: return the engine's present address, or
    None if the engine does not come back. The IO thread calls locate after a loss until an engine answers; it must not
    block.
    """

    def __init__(
        self,
        address: str,
        *,
        pidfd: int | None = None,
        describe_exit: Callable[[], str] | None = None,
        grace: float = 2.0,
        locate: Locate | None = None,
    ) -> None:
        self._address = address
        may_return = pidfd is None and (locate is not None or address.startswith("tcp://"))
        self._grace = grace if may_return else 0.0
        self._locate = locate
        self._asked_at = 0.0  # monotonic; last call of locate()
        self._lost_at: float | None = None  # monotonic; None while connected
        self._is_refused = False  # the two ends did not agree on keys
        self._heartbeat = b""
        self._heartbeat_s = 0.0  # 0 = none
        self._sent_at = 0.0  # monotonic
        self._pidfd = pidfd
        self._describe_exit = describe_exit
        self._serving = threading.Lock()  # held from the receipt of frames until on_frames returns; taken before _using
        self._borrower: Borrower | None = None
        self._failure: Exception | None = None  # of a borrower's receive()
        self._on_frames: OnFrames | None = None
        self._using = threading.Lock()  # guards the open socket; held for a call or two, never while waiting
        self._open_socket: zmq.Socket[bytes] | None = None  # None: what is sent is queued
        self._sender = 0  # id of the thread in send(); a finalizer may call close() in the middle of it
        self._queue = SendQueue()
        self._closed = False
        self._wake_fd = -1
        self._close_wake_fd: weakref.finalize[[int], ZmqTransport] | None = None
        self._thread: threading.Thread | None = None

    def start(self, on_frames: OnFrames, on_dead: OnDead, on_lost: OnLost) -> None:
        """Connect and start the IO thread. Errors: AddressError; EngineDeadError if nothing listens there."""
        check_listening(self._address)
        context = zmq.Context()
        try:
            connection = connect(context, self._address)
        except BaseException:
            context.term()
            raise
        self._on_frames = on_frames
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._close_wake_fd = weakref.finalize(self, os.close, self._wake_fd)
        arguments = (context, connection, on_dead, on_lost)
        self._thread = threading.Thread(target=self._run, args=arguments, name="engine-client-io", daemon=True)
        self._thread.start()

    def send(self, frame: bytes) -> None:
        """Send a frame, or queue it for the IO thread; see Transport."""
        if self._closed:
            return
        self._queue.check(frame, self._address)
        borrower = self._borrower
        if borrower is not None and borrower.collect(self._send_collected):
            self._queue.put(frame)
            if len(self._queue) >= _MOST_COLLECTED and not self._using.locked():
                self._send_collected()
        elif not self._send_now(frame):
            self._queue.put(frame)
            os.eventfd_write(self._wake_fd, 1)

    def _send_now(self, frame: bytes) -> bool:
        """Send the frame; return False if it must be queued.

        A frame that a finalizer or a signal handler sends during another send must also be queued.
        """
        if self._queue or self._using.locked():
            return False
        self._sender = threading.get_ident()
        try:
            with self._using:
                if self._open_socket is None:
                    return False
                self._open_socket.send(frame, zmq.NOBLOCK)
                self._sent_at = time.monotonic()
                if pending_events(self._open_socket) & READABLE:
                    self._wake_receiver()
        except zmq.Again:
            return False
        except BaseException:  # a KeyboardInterrupt, perhaps after the send
            os.eventfd_write(self._wake_fd, 1)
            raise
        finally:
            self._sender = 0
        return True

    def _send_collected(self) -> None:
        """Send the frames queued in the borrower's turn: the socket's own thread is woken once for all of them."""
        with self._using:
            self._sender = threading.get_ident()
            try:
                socket = self._open_socket
                if not self._queue or socket is None:  # the next connection starts without it
                    return
                all_sent, has_news = self._flush(socket), pending_events(socket) & READABLE
            finally:
                self._sender = 0
        if not all_sent:
            os.eventfd_write(self._wake_fd, 1)
        if has_news:
            self._wake_receiver()

    def lend(self, borrower: Borrower | None) -> None:
        """Let an event loop receive; see Transport."""
        if not self._closed:
            self._borrower = borrower
            os.eventfd_write(self._wake_fd, 1)

    def receive(self) -> bool:
        """Receive instead of the IO thread, which gets the errors; see Transport."""
        try:
            with self._serving:
                has_more = self._open_socket is not None and self._pass_on(self._open_socket)
        except Exception as error:
            self._failure = error
            os.eventfd_write(self._wake_fd, 1)
            return False
        if self._queue and not self._closed:  # the socket's file descriptor may signal that it accepts frames again
            self._send_collected()
        return has_more

    def _pass_on(self, socket: zmq.Socket[bytes]) -> bool:
        """Receive a batch of frames and pass it on, under the lock; return whether there may be more."""
        with self._using:
            if self._open_socket is None:
                return False
            frames, has_more = receive_batch(socket)
        if frames and self._on_frames is not None:
            self._lost_at, self._is_refused = None, False
            self._on_frames(frames)
        return has_more

    def _wake_receiver(self) -> None:
        if self._borrower is None:
            os.eventfd_write(self._wake_fd, 1)
        else:
            self._borrower.look()

    def close(self) -> None:
        """Stop the IO thread and wait for it, unless it is the caller or interrupted the caller's send()."""
        self._closed = True
        if self._thread is None or self._close_wake_fd is None or not self._close_wake_fd.alive:
            return
        os.eventfd_write(self._wake_fd, 1)
        if threading.get_ident() not in (self._thread.ident, self._sender):
            self._thread.join()
            self._close_wake_fd()

    def keep_alive(self, frame: bytes, seconds: float) -> None:
        """Set the heartbeat; see Transport."""
        self._heartbeat, self._heartbeat_s, self._sent_at = frame, seconds, time.monotonic()

    def await_return(self, seconds: float) -> None:
        """Set the grace; see Transport. An engine whose death this transport itself notices does not come back."""
        if self._pidfd is None:
            self._grace = max(self._grace, seconds)

    def _run(self, context: Context, connection: Connection, on_dead: OnDead, on_lost: OnLost) -> None:
        try:
            while (reason := self._serve(connection)) is None:
                connection.close(linger_s=0.0)
                if self._lost_at is not None:
                    time.sleep(_RETRY_S)  # a proxy that accepts connections for a lost engine closed this one too
                self._look_for_engine(time.monotonic())
                connection = connect(context, self._address)
                self._begin_again(on_lost())
        except Exception as error:  # without a report, every caller would wait forever
            _log.exception("the IO thread of the client of %s failed", self._address)
            reason = f"the client's IO thread failed: {type(error).__name__}: {error}"
        asked, self._closed = self._closed, True
        connection.close(linger_s=0.0 if reason else _LAST_FRAMES_S)
        context.term()
        if reason and not asked:
            on_dead(reason)

    def _look_for_engine(self, now: float) -> _End | None:
        """Call locate(); return MOVED or GONE if the engine is not at its old address."""
        if self._locate is None:
            return None
        self._asked_at = now
        address = self._locate()
        if address is None:
            return _End.GONE
        has_moved, self._address = address != self._address, address
        return _End.MOVED if has_moved else None

    def _begin_again(self, hello: bytes) -> None:
        """Replace the queued frames by `hello`; the client sends what still matters after the answer to it."""
        if self._lost_at is None:
            self._lost_at = time.monotonic()
        self._heartbeat_s = 0.0  # until the next session sets it
        self._queue.restart(hello)

    def _serve(self, connection: Connection) -> str | None:
        """Send and receive frames until the connection ends. Return "" after close(), the reason if the engine is gone,
        or None if the IO thread should reconnect.
        """
        socket, monitor = connection.socket, connection.monitor
        self._open_socket = socket
        try:
            end = self._serve_until_end(socket, monitor)
        finally:
            with self._using:
                self._open_socket = None
        if end is _End.CLOSED:
            if not self._flush(socket) and socket.poll(int(_LAST_FRAMES_S * 1000), zmq.POLLOUT):
                self._flush(socket)
            return ""
        if end is _End.MOVED:
            return None
        if end is _End.GRACE_OVER:
            return f"{self._describe_disconnect()} and did not answer again within {self._grace:g} s"
        if end is _End.GONE:
            return self._describe_gone()
        with self._serving:
            self._receive_last(socket, monitor, _LAST_FRAMES_S if end is _End.PROCESS else 0.0)
        if end is _End.PROCESS:
            return self._describe_exit() if self._describe_exit is not None else "the engine process has ended"
        if self._grace > 0.0 and not self._closed:
            return None
        return self._describe_disconnect()

    def _serve_until_end(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> _End:
        """Receive, unless a borrower does; send what is queued; return how the connection ended."""
        poller, borrower = select.poll(), None
        for fd in (signal_fd(socket), signal_fd(monitor), self._wake_fd, self._pidfd):
            if fd is not None:
                poller.register(fd, select.POLLIN)
        ready = {signal_fd(monitor)}  # so that the first round reads the monitor
        while True:
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            if self._failure is not None:
                raise self._failure
            if self._borrower is not borrower:
                before, borrower = borrower, self._borrower
                self._lend_socket(signal_fd(socket), poller, before, borrower)
            if borrower is None:
                with self._serving:
                    self._pass_on(socket)
            if (end := self._find_end(monitor, ready)) is not None:
                return end
            with self._using:
                self._send_heartbeat(socket)
                all_sent = self._flush(socket)
                events = pending_events(socket)
            if self._closed:
                return _End.CLOSED
            if borrower is not None and events & READABLE:
                borrower.look()
            awaited = (0 if borrower is not None else READABLE) | (0 if all_sent else WRITABLE)
            ready = {fd for fd, _ in poller.poll(0 if events & awaited else self._poll_ms())}

    def _lend_socket(self, fd: int, poller: select.poll, before: Borrower | None, now: Borrower | None) -> None:
        """Stop or resume polling the socket's file descriptor. A borrower's copy of it outlives the socket."""
        if before is None:
            poller.unregister(fd)
        if now is None:
            poller.register(fd, select.POLLIN)
        else:
            now.watch(os.dup(fd))

    def _find_end(self, monitor: zmq.Socket[bytes], ready: set[int]) -> _End | None:
        if self._pidfd in ready:
            return _End.PROCESS
        while signal_fd(monitor) in ready and monitor.poll(0):
            event, value = receive_event(monitor)
            if event == zmq.EVENT_DISCONNECTED:
                return _End.CONNECTION
            self._is_refused = value != errno.EAGAIN  # EAGAIN: the engine said nothing in time
        if self._lost_at is None:
            return None
        now = time.monotonic()
        if now - self._lost_at > self._grace:
            return _End.GRACE_OVER
        return self._look_for_engine(now) if now - self._asked_at >= _LOCATE_S else None

    def _poll_ms(self) -> int | None:
        """Return the milliseconds until the next heartbeat, locate() or the end of the grace; None = no limit."""
        now, due = time.monotonic(), []
        if self._heartbeat_s > 0.0:
            due.append(self._sent_at + self._heartbeat_s - now)
        if self._lost_at is not None:
            due.append(self._lost_at + self._grace - now)
            if self._locate is not None:
                due.append(self._asked_at + _LOCATE_S - now)
        return max(0, int(min(due) * 1000) + 1) if due else None

    def _send_heartbeat(self, socket: zmq.Socket[bytes]) -> None:
        """Send a heartbeat if one is due. A full socket needs none: other frames are being sent."""
        now = time.monotonic()
        if self._heartbeat_s > 0.0 and now - self._sent_at >= self._heartbeat_s:
            self._sent_at = now
            with contextlib.suppress(zmq.Again):
                socket.send(self._heartbeat, zmq.NOBLOCK)

    def _flush(self, socket: zmq.Socket[bytes]) -> bool:
        """Send queued frames; return False if the socket accepts no more now."""
        if not self._queue:
            return True
        self._sent_at = time.monotonic()
        return self._queue.flush(socket)

    def _receive_last(
        self,
        socket: zmq.Socket[bytes],
        monitor: zmq.Socket[bytes],
        wait_s: float,
    ) -> None:
        """Receive the frames that the engine sent before it ended: ZeroMQ reports the disconnect after the last one."""
        deadline = time.monotonic() + wait_s
        while not monitor.poll(0) and (left := deadline - time.monotonic()) > 0:
            poller = zmq.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(monitor, zmq.POLLIN)
            poller.poll(int(left * 1000) + 1)
            self._pass_on_last(socket)
        while self._pass_on_last(socket):
            pass

    def _pass_on_last(self, socket: zmq.Socket[bytes]) -> bool:
        """Pass on the frames of a socket that is no longer used otherwise; return whether there were any."""
        frames, _ = receive_batch(socket)
        if frames and self._on_frames is not None:
            self._on_frames(frames)
        return bool(frames)

    def _describe_gone(self) -> str:
        if self._describe_exit is not None:
            return self._describe_exit()
        return f"{self._describe_disconnect()} and does not come back"

    def _describe_disconnect(self) -> str:
        if self._pidfd is not None and self._describe_exit is not None:
            poller = zmq.Poller()
            poller.register(self._pidfd, zmq.POLLIN)
            if poller.poll(int(_LAST_FRAMES_S * 1000)):
                return self._describe_exit()
        if self._is_refused and self._address.startswith("tcp://"):
            path, _, keys = self._address.partition("?keys=")
            why = f"{keys} does not fit it, or is not allowed there" if keys else "the address names none (?keys=FILE)"
            return f"the engine at {path} refused the connection, as one with keys does: {why}"
        return f"the engine at {self._address} closed the connection"
