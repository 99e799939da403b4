"""The IO thread: owns the engine's socket and its sessions; the engine thread never touches them.

In: frames are handed to the reception (core/reception.py), which answers them or puts them into the inbox. Out: the
messages of each step are taken from the outbox, encoded and sent. Its death is the process's death, because an engine
that cannot be reached looks alive.
"""

import os
import threading
import time
import traceback
from collections.abc import Sequence
from queue import Empty, SimpleQueue

import zmq
from zmq.utils.monitor import recv_monitor_message

from core import log
from core.engine import EndPause
from core.inbox import Inbox
from core.lease_clock import LeaseClock
from core.reception import Reception, Served
from core.sessions import Sessions
from ipc.messages import CallResult, EngineStopping, ErrorCode, ServerMessage
from ipc.sockets import BoundRouter, Context

MAX_OUTBOX_STEPS = 32  # results of steps that wait to be sent; then the engine waits
_MESSAGES_PER_ROUND = 256  # received before results are sent again
_STEPS_PER_ROUND = 4  # sent before messages are received again
_FULL_S = 0.001  # between looks at an outbox that is full
_MIN_RETRY_MS, _MAX_RETRY_MS = 10, 160  # between attempts to send to clients whose queues are full
_FLUSH_S = 0.5  # given to slow clients when the engine stops
_TICKS_PER_LEASE = 8
_LOG_S = 0.5  # for the last lines on standard error

Addressed = tuple[int, ServerMessage]
_NOBODY = 0  # client of an input that is no client's


class IOThread:
    """Made and bound by the main thread, then run on its own. Takes ownership of the socket and of its context."""

    def __init__(self, context: Context, router: BoundRouter, served: Served) -> None:
        self._thread = threading.Thread(target=self._run, name="io", daemon=True)
        self.inbox = Inbox()
        self.sessions = Sessions(router.socket, self.inbox, served.client_weights)
        self._outbox: SimpleQueue[Sequence[Addressed] | EngineStopping] = SimpleQueue()
        self._is_asleep = False  # or about to be: it has to be woken for what is put into the outbox
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wake_lock = threading.Lock()
        self._context = context
        self._router = router
        self._socket = router.socket
        self._lease_s = served.welcome.limits.lease_ms / 1000
        self._clock = LeaseClock(self._lease_s / _TICKS_PER_LEASE, time.monotonic())
        self.reception = Reception(
            served,
            self.sessions,
            self.inbox,
            self._clock,
            on_connect=self._close_disconnected,
            on_drain=self.drain,
            on_shutdown=self._shut_down,
        )
        self._next_look = 0.0  # for silent clients, on the lease clock
        self._retry_ms = _MIN_RETRY_MS
        self._drain_asked = False
        self._shutdown_asked = False

    # --- called by other threads ---

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def put(self, messages: Sequence[Addressed]) -> None:
        """What a step produced. Waits while MAX_OUTBOX_STEPS are unsent."""
        if not messages:
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
        self._outbox.put(EngineStopping(error))
        self._wake_up()
        self._thread.join(timeout)

    def _wake_up(self) -> None:
        with self._wake_lock:
            if self._wake >= 0:  # else the thread has ended
                os.eventfd_write(self._wake, 1)

    # --- the thread ---

    def _run(self) -> None:
        try:
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._serve()
        except BaseException:
            self._router.remove_files()
            log.say(traceback.format_exc())
            log.say("engine-core: the IO thread failed; the engine process ends")
            log.flush(_LOG_S)
            os._exit(1)
        if self._shutdown_asked:
            log.flush(_LOG_S)
            os._exit(0)

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._wake):
            poller.register(source, zmq.POLLIN)
        while True:
            may_receive = not self.inbox.is_overfull  # or the clients' messages stay with them
            poller.modify(self._socket, zmq.POLLIN if may_receive else 0)
            self._is_asleep = True  # before the look at the outbox: what is put in after it finds this
            ready = dict(poller.poll(0 if self._outbox.qsize() else self._poll_ms(may_receive)))
            self._is_asleep = False
            now = time.monotonic()
            if self._monitor in ready:
                self._close_disconnected()
            has_read = self._receive(now) if self._socket in ready else may_receive
            self._end_silent(now, has_read=has_read)
            if self._wake in ready:
                os.eventfd_read(self._wake)
                if self._drain_asked and not self.reception.is_draining:
                    self.reception.is_draining = True
                    self.inbox.put(_NOBODY, EndPause())
                    self.inbox.put_end()
            if (stopping := self._send_outbox(now)) is not None:
                self._stop(stopping)
                return
            if self._shutdown_asked:
                self._stop(EngineStopping("its owner has shut it down"))
                return
            progress = self.sessions.flush(now)
            self._retry_ms = _MIN_RETRY_MS if progress else min(2 * self._retry_ms, _MAX_RETRY_MS)

    def _poll_ms(self, may_receive: bool) -> int | None:
        """None = sleep until something happens."""
        if not may_receive:
            return _MIN_RETRY_MS
        if self.sessions.has_unsent:
            return self._retry_ms
        has_leases = any(session.has_lease for session in self.sessions.all)
        return int(self._clock.tick * 1000) + 1 if has_leases else None

    def _receive(self, now: float) -> bool:
        """Whether everything that had arrived was read."""
        for _ in range(_MESSAGES_PER_ROUND):
            if self.inbox.is_overfull:
                return False
            try:
                identity = last = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            frame, num_frames = zmq.Frame(), 0
            while last.more:
                last = self._socket.recv(copy=False)  # only the first is kept: a peer may send any number
                frame, num_frames = (last, 1) if num_frames == 0 else (frame, num_frames + 1)
            self.reception.receive(identity.bytes, frame, num_frames, now)
        return False

    def _send_outbox(self, now: float) -> EngineStopping | None:
        """Some of it: an engine that is faster than this thread does not keep it from its clients."""
        for _ in range(_STEPS_PER_ROUND):
            try:
                messages = self._outbox.get_nowait()
            except Empty:
                return None
            if isinstance(messages, EngineStopping):
                return messages
            for client, message in messages:
                session = self.sessions.of_client(client)
                if session is not None:
                    session.requests.note(message)
                    session.num_calls -= isinstance(message, CallResult)
                    self.sessions.send(session, message, now)
        return None

    def _stop(self, stopping: EngineStopping) -> None:
        now = time.monotonic()
        for session in list(self.sessions.all):
            self.sessions.send(session, stopping, now)
        deadline = now + _FLUSH_S
        while self.sessions.has_unsent and (now := time.monotonic()) < deadline:
            if not self.sessions.flush(now):
                time.sleep(_MIN_RETRY_MS / 1000)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._router.close()
        self._context.term()  # returns when all is sent or the socket's linger time is over
        with self._wake_lock:
            os.close(self._wake)
            self._wake = -1

    def _shut_down(self) -> None:
        self._shutdown_asked = True

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
