"""The IO thread: serves the engine's socket and its sessions.

In: frames are handed to the reception (core/border/reception.py), which answers them or puts them into the inbox. Out:
the messages of each step are taken from the outbox, encoded and sent. If this fails the process ends, because an engine
that cannot be reached looks alive.

To wake a thread costs up to 65 microseconds here, with Python's lock handed over. So an engine thread that has nothing
to run receives for itself, and it sends what goes to few clients itself: a request that finds the engine idle meets no
second thread. Socket and sessions belong to whoever holds the lock; both threads sleep without it, on file descriptors.
"""

import os
import select
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from queue import SimpleQueue
from typing import NoReturn

import zmq
from zmq.utils.monitor import recv_monitor_message

from core import log
from core.border.inbox import Inbox
from core.border.lease_clock import LeaseClock
from core.border.preparation import Preparation, Preparer
from core.border.reception import Reception, Served
from core.border.sessions import Sessions
from core.inputs import EndPause, EngineInput
from ipc.messages import CallResult, EngineStopping, ErrorCode, ServerMessage
from ipc.sockets import BoundRouter, Context, pending_events, signal_fd

MAX_OUTBOX_STEPS = 32  # results of steps that wait to be sent; then the engine waits
_MESSAGES_PER_ROUND = 256  # received before results are sent again
_STEPS_PER_ROUND = 4  # sent before messages are received again
_MAX_SENT_BY_ENGINE = 2  # messages of a step that cost its thread less than to wake this one
_FULL_S = 0.001  # between looks at an outbox that is full
_MIN_RETRY_S, _MAX_RETRY_S = 0.01, 0.16  # between attempts to send to clients whose queues are full
_FLUSH_S = 0.5  # given to slow clients when the engine stops
_TICKS_PER_LEASE = 8
_LOG_S = 0.5  # for the last lines on standard error

AddressedMessage = tuple[int, ServerMessage]
_NOBODY = 0  # client of an input that is no client's


class IOThread:
    """Made and bound by the main thread, then run on its own. Takes ownership of the socket and of its context."""

    def __init__(self, context: Context, router: BoundRouter, served: Served, preparer: Preparer | None = None) -> None:
        """preparer: None = no request has anything to prepare."""
        self._thread = threading.Thread(target=self._run, name="io", daemon=True)
        self.inbox = Inbox()
        self.sessions = Sessions(router.socket, self.inbox, served.client_weights)
        self._outbox: SimpleQueue[Sequence[AddressedMessage]] = SimpleQueue()
        self._stopping: EngineStopping | None = None  # to be said when the outbox is empty
        self._is_asleep = False  # or about to be: it has to be woken for what is put into the outbox
        self._sleep_s: float | None = None  # how long at most; None = until it is woken
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wake_lock = threading.Lock()
        self._engine_is_asleep = False  # it has to be woken for what is put into the inbox
        self._wake_engine = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._wake_engine)  # the engine thread may outlive this one
        self._context = context
        self._router = router
        self._socket = router.socket
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._using = threading.Lock()  # socket, monitor, sessions and reception; the last to use them keeps it
        self._socket_fd = signal_fd(self._socket)
        self._sources = select.epoll()
        for fd in (self._socket_fd, signal_fd(self._monitor), self._wake):
            self._sources.register(fd, select.EPOLLIN)
        self._engine_sources = select.poll()
        for fd in (self._socket_fd, self._wake_engine):
            self._engine_sources.register(fd, select.POLLIN)
        self._lease_s = served.welcome.limits.lease_ms / 1000
        self._clock = LeaseClock(self._lease_s / _TICKS_PER_LEASE, time.monotonic())
        self._preparation: Preparation | None = None
        if preparer is not None:
            self._preparation = Preparation(preparer, self.inbox, served.welcome.epoch, self._wake_up)
            self.sessions.on_close = self._preparation.forget
        self.reception = Reception(
            served,
            self.sessions,
            self.inbox,
            self._clock,
            self._preparation,
            on_connect=self._close_disconnected,
            on_drain=self.drain,
            on_shutdown=self._shut_down,
        )
        self._next_look = 0.0  # for silent clients, on the lease clock
        self._retry_s = _MIN_RETRY_S
        self._drain_asked = False
        self._has_ended_inbox = False
        self._shutdown_asked = False

    # --- called by other threads ---

    def start(self) -> None:
        self._thread.start()

    def take(self, timeout: float | None) -> list[tuple[int, EngineInput]]:
        """What has come for the engine thread, which calls this; waits up to `timeout` seconds, None = for ever."""
        if timeout != 0 and self.inbox.is_empty:
            try:
                self._receive_for_engine(timeout)
            except BaseException:
                self._fail()
        return self.inbox.drain()

    def put(self, messages: Sequence[AddressedMessage]) -> None:
        """What a step produced; the engine thread calls this. Waits while MAX_OUTBOX_STEPS are unsent."""
        if not messages or (len(messages) <= _MAX_SENT_BY_ENGINE and self._send_for_engine(messages)):
            return
        while self._outbox.qsize() >= MAX_OUTBOX_STEPS:
            time.sleep(_FULL_S)
        self._outbox.put(messages)
        if self._is_asleep:
            self._wake_up()

    def drain(self) -> None:
        """Refuse new requests from now on and end the inbox."""
        self._drain_asked = True
        self._wake_up()

    def finish(self, error: str, timeout: float) -> None:
        """Send what is in the outbox, then EngineStopping(error) to every session, and end. May be called again."""
        self._stopping = self._stopping or EngineStopping(error)
        self._wake_up()
        self._thread.join(timeout)

    def _wake_up(self) -> None:
        with self._wake_lock:
            if self._wake >= 0:  # else the thread has ended
                os.eventfd_write(self._wake, 1)

    # --- the engine thread, in this one's place ---

    def _receive_for_engine(self, timeout: float | None) -> None:
        """Sleep until the inbox has something or `timeout` is over; the IO thread is not woken for messages."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self._engine_is_asleep = True  # before the look at the inbox: what is put in after it finds this
        with self._using:
            self._sources.modify(self._socket_fd, 0)
        while True:
            with self._using:
                has_read = self._receive(time.monotonic())
                due_s = self._due_s(may_receive=has_read)
            if due_s is not None and (self._sleep_s is None or due_s < self._sleep_s):
                self._wake_up()
            left_ms = None if deadline is None else (deadline - time.monotonic()) * 1000
            if not self.inbox.is_empty or (left_ms is not None and left_ms <= 0):
                break
            if (self._wake_engine, select.POLLIN) in self._engine_sources.poll(left_ms):
                os.eventfd_read(self._wake_engine)
        self._engine_is_asleep = False
        with self._using:
            self._sources.modify(self._socket_fd, select.EPOLLIN)

    def _send_for_engine(self, messages: Sequence[AddressedMessage]) -> bool:
        """False: they are to be put behind others."""
        if not self._using.acquire(blocking=False):
            return False
        try:
            if not self._outbox.empty():
                return False
            self._send(messages, time.monotonic())
            if self.sessions.has_unsent or self._has_unread:
                self._wake_up()
        except BaseException:
            self._fail()
        finally:
            self._using.release()
        return True

    # --- the thread ---

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:
            self._fail()
        if self._shutdown_asked:
            log.flush(_LOG_S)
            os._exit(0)

    def _fail(self) -> NoReturn:
        self._router.remove_files()
        log.say(traceback.format_exc())
        log.say("engine-core: the socket could not be served; the engine process ends")
        log.flush(_LOG_S)
        os._exit(1)

    def _serve(self) -> None:
        while True:
            self._using.acquire()
            due_s = self._round(time.monotonic())
            if self._shutdown_asked:
                self._stop(EngineStopping("its owner has shut it down"))
                return
            if self._stopping is not None and self._outbox.empty():
                self._stop(self._stopping)
                return
            self._sleep_s = due_s  # before the lock is released: the engine thread compares
            self._using.release()
            if self._engine_is_asleep and not self.inbox.is_empty:
                os.eventfd_write(self._wake_engine, 1)
            self._is_asleep = True  # before the look at the outbox: what is put in after it finds this
            for fd, _ in self._sources.poll(due_s if self._outbox.empty() else 0):
                if fd == self._wake:
                    os.eventfd_read(self._wake)
            self._is_asleep = False

    def _round(self, now: float) -> float | None:
        """See to all there is; seconds until there may be more to do, None = when something happens."""
        self._close_disconnected()
        may_receive = not self.inbox.is_overfull  # or the clients' messages stay with them
        has_read = may_receive and self._receive(now)
        self._end_silent(now, has_read=has_read)
        if self._preparation is not None:
            self._send(self._preparation.take_done(), now)
        if self._drain_asked and not self._has_ended_inbox:
            self._end_inbox()
        self._send_outbox(now)
        progress = self.sessions.flush(now)
        self._retry_s = _MIN_RETRY_S if progress else min(2 * self._retry_s, _MAX_RETRY_S)
        has_unread = self._has_unread  # asked in any case: else the file descriptor may stay readable
        return 0 if may_receive and has_unread else self._due_s(may_receive=may_receive)

    def _end_inbox(self) -> None:
        """Refuse new requests at once; end the inbox when what is in preparation has gone into it."""
        if not self.reception.is_draining:
            self.reception.is_draining = True
            self.inbox.put(_NOBODY, EndPause())
        if not self._preparation:
            self._has_ended_inbox = True
            self.inbox.put_end()

    def _due_s(self, *, may_receive: bool) -> float | None:
        if not may_receive:
            return _MIN_RETRY_S
        if self.sessions.has_unsent:
            return self._retry_s
        return self._clock.tick if any(session.has_lease for session in self.sessions.all) else None

    @property
    def _has_unread(self) -> bool:
        return bool(pending_events(self._socket) & zmq.POLLIN)

    def _receive(self, now: float) -> bool:
        """Whether everything that had arrived was read."""
        for _ in range(_MESSAGES_PER_ROUND):
            if self.inbox.is_overfull or self._shutdown_asked:
                return False
            try:
                identity = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return True
            frame = last = self._socket.recv(copy=False)
            num_frames = 1
            while last.more:  # only the first is kept: a peer may send any number
                last = self._socket.recv(copy=False)
                num_frames += 1
            self.reception.receive(identity, frame, num_frames, now)
        return False

    def _send_outbox(self, now: float) -> None:
        """Some of it: an engine that is faster than this thread does not keep it from its clients."""
        for _ in range(min(_STEPS_PER_ROUND, self._outbox.qsize())):
            self._send(self._outbox.get_nowait(), now)

    def _send(self, messages: Sequence[AddressedMessage], now: float) -> None:
        for client, message in messages:
            session = self.sessions.of_client(client)
            if session is not None:
                session.requests.note(message)
                session.num_calls -= isinstance(message, CallResult)
                self.sessions.send(session, message, now)

    def _stop(self, stopping: EngineStopping) -> None:
        if self._preparation is not None:
            self._preparation.close()
        now = time.monotonic()
        for session in list(self.sessions.all):
            self.sessions.send(session, stopping, now)
        deadline = now + _FLUSH_S
        while self.sessions.has_unsent and (now := time.monotonic()) < deadline:
            if not self.sessions.flush(now):
                time.sleep(_MIN_RETRY_S)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._router.close()
        self._context.term()  # returns when all is sent or the socket's linger time is over
        with self._wake_lock:
            os.close(self._wake)
            self._wake = -1

    def _shut_down(self) -> None:
        self._shutdown_asked = True
        self._wake_up()

    # --- ends of sessions that nobody asked for ---

    def _close_disconnected(self) -> None:
        """End the sessions whose connection ended, however the client died."""
        while self._monitor.poll(0):
            fd = int(recv_monitor_message(self._monitor)["value"])
            for session in self.sessions.of_fd(fd):
                self.sessions.lose(session)

    def _end_silent(self, now: float, *, has_read: bool) -> None:
        """End the sessions whose lease has run out: a client that is stopped, or far away and unreachable."""
        self._clock.advance(now, has_read=has_read)
        if self._clock.time < self._next_look:
            return
        self._next_look = self._clock.time + self._clock.tick
        oldest = self._clock.time - self._lease_s
        for session in [one for one in self.sessions.all if one.has_lease and one.seen < oldest]:
            text = f"nothing was heard of this client for {self._lease_s:g} s (its lease); its requests were aborted"
            self.sessions.end(session, ErrorCode.DEADLINE_EXCEEDED, text)
