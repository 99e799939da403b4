"""The IO thread: serves the engine's socket and its sessions.

core/border/socket_rounds.py does the work at the socket; this file decides which thread does it and when. In: the
reception (core/border/reception.py) answers frames or puts them into the inbox. Out: the messages of each step are
taken from the outbox, encoded and sent. If the thread fails, the process ends, because an unreachable engine would look
alive.

Waking a thread costs up to 65 microseconds, including the handover of the GIL. So an engine thread without work
receives messages itself, and if a step has messages for only a few clients, it sends them itself: a request to an idle
engine needs no second thread. The thread that holds the lock owns the socket and the sessions. Both threads sleep on
file descriptors, without the lock.
"""

import os
import select
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from typing import NoReturn

from core import log
from core.border.adapter_calls import AdapterShelf
from core.border.departure import Departure
from core.border.doorway import Doorway, max_connections, monitor_of
from core.border.preparation import Preparer
from core.border.reception import Served
from core.border.socket_rounds import NOBODY, AddressedMessage, Border
from core.border.weight_calls import WeightReader
from core.inputs import EngineInput, ExecutorNews, StoreNews
from ipc.wire.messages import EngineStopping
from ipc.wire.sockets import BoundRouter, Context, signal_fd
from ipc.wire.start_messages import Isolate

MAX_OUTBOX_STEPS = 32  # results of steps waiting to be sent; beyond it the engine waits
_MAX_SENT_BY_ENGINE = 2  # messages of a step that are cheaper to send than waking this thread
_FULL_S = 0.001  # between checks of a full outbox
#: Pause between two rounds that each left messages unread, so that the engine thread gets the GIL at once. Otherwise it
#: would wait 5 ms each time it takes the GIL, which is several times per step.
_PACE_S = 0.001
_RETRY_S = 0.01  # between attempts to send the last messages to clients whose queues are full
_FLUSH_S = 0.5  # time for slow clients when the engine stops
_MOST_WAITS = 5  # for progress, while the engine stops
_LOG_S = 0.5  # for writing the last lines to standard error


class IOThread:
    """The IO thread, created by the main thread. It takes ownership of the bound socket and its context."""

    def __init__(
        self,
        context: Context,
        router: BoundRouter,
        served: Served,
        preparers: Sequence[Preparer] = (),
        *,
        adapters: AdapterShelf | None = None,
        updates: WeightReader | None = None,
    ) -> None:
        """Create the thread; start() runs it. preparers: the kinds of preparation for requests. adapters: None = not
        enabled. updates: None = the executor cannot change its weights.
        """
        self._thread = threading.Thread(target=self._run, name="io", daemon=True)
        self._stopping: EngineStopping | None = None  # to be sent when the outbox is empty
        self._num_turns = 0  # its progress
        self._is_asleep = False  # asleep or about to be: it must be woken when something is put into the outbox
        self._sleep_s: float | None = None  # for how long at most; None = until it is woken
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wake_lock = threading.Lock()
        self._engine_is_asleep = False  # it must be woken when something is put into the inbox
        self._wake_engine = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._wake_engine)  # the engine thread may outlive this one
        self.will_be_replaced = served.welcome.limits.resume_ms > 0  # by another engine after its death
        self._context = context
        self._router = router
        self._socket = router.socket
        self._monitor = monitor_of(context, self._socket)
        self._using = threading.Lock()  # socket, monitor and border; the last thread to use them keeps it
        self._socket_fd = signal_fd(self._socket)
        self._sources = select.epoll()
        for fd in (self._socket_fd, signal_fd(self._monitor), self._wake):
            self._sources.register(fd, select.EPOLLIN)
        self._engine_sources = select.poll()
        for fd in (self._socket_fd, self._wake_engine):
            self._engine_sources.register(fd, select.POLLIN)
        self._engine_fd = -1  # of the engine itself, see wake_engine_on()
        self._is_kept = False  # this thread does not sleep on the socket, because the engine thread has kept it
        self.border = Border(
            self._socket,
            self._monitor,
            served,
            time.monotonic(),
            preparers=preparers,
            doorway=Doorway(max_connections()),
            adapters=adapters,
            updates=updates,
            on_drain=self.drain,
            on_shutdown=self._wake_up,
            on_prepared=self._wake_up,
        )
        self.inbox, self.sessions, self._outbox = self.border.inbox, self.border.sessions, self.border.outbox

    # --- called by other threads ---

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def take(self, timeout: float | None) -> list[tuple[int, EngineInput]]:
        """Return the engine thread's inputs, waiting for some up to `timeout` seconds; None = forever."""
        if timeout != 0 and self.inbox.is_empty:
            try:
                self._receive_for_engine(timeout)
            except BaseException:
                self._fail()
        elif self._is_kept:
            self._hand_over()
        return self.inbox.drain()

    def wake_engine_on(self, fd: int) -> None:
        """Make take() also return when this file descriptor is readable: the engine has other sources than clients.

        The engine's steps are short, so the engine thread keeps the socket during a step that follows a wait.
        """
        self._engine_fd = fd
        self._engine_sources.register(fd, select.POLLIN)

    def put(self, messages: Sequence[AddressedMessage]) -> None:
        """Send the messages of a step, for the engine thread. Waits while MAX_OUTBOX_STEPS are unsent."""
        if not messages or (len(messages) <= _MAX_SENT_BY_ENGINE and self._send_for_engine(messages)):
            return
        while self._outbox.qsize() >= MAX_OUTBOX_STEPS:
            time.sleep(_FULL_S)
        self._outbox.put(messages)
        if self._is_asleep:
            self._wake_up()

    def put_news(self, news: ExecutorNews | StoreNews) -> None:
        """Pass news from the executor or the store of KV blocks to the engine thread. For any thread."""
        self.inbox.put_news(NOBODY, news)
        if self._engine_is_asleep:
            os.eventfd_write(self._wake_engine, 1)

    def isolate(self, which: Isolate) -> None:
        """Stop running these requests from now on, and let the others run."""
        self.border.isolate = which
        self._wake_up()

    def drain(self) -> None:
        """Refuse new requests from now on and end the inbox."""
        self.border.drain_asked = True
        self._wake_up()

    @property
    def departure(self) -> Departure:
        """Return what the owner requested of the drain."""
        return self.border.departure

    def finish(self, last: EngineStopping, timeout: float) -> None:
        """Send what is in the outbox, then `last` to every session, and end. May be called again.

        timeout: seconds without any progress of the thread after which the caller does not wait any longer. On a busy
        machine it may wait for a core at each turn, and what is unsent when the process ends is lost.
        """
        self._stopping = self._stopping or last
        self._wake_up()
        for _ in range(_MOST_WAITS):
            before = self._num_turns
            self._thread.join(timeout)
            if not self._thread.is_alive() or self._num_turns == before:
                return

    def _wake_up(self) -> None:
        with self._wake_lock:
            if self._wake >= 0:  # otherwise the thread has ended
                os.eventfd_write(self._wake, 1)

    # --- the engine thread, in this one's place ---

    def _receive_for_engine(self, timeout: float | None) -> None:
        """Sleep until the inbox has something or `timeout` is over.

        Messages do not wake the IO thread during that time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self._engine_is_asleep = True  # set before looking at the inbox, so that a later put sees it
        if not self._is_kept:
            with self._using:
                self._sources.modify(self._socket_fd, 0)
            self._is_kept = True
        while True:
            with self._using:
                has_read = self.border.receive(time.monotonic())
                due_s = self.border.due_s(may_receive=has_read)
            if due_s is not None and (self._sleep_s is None or due_s < self._sleep_s):
                self._wake_up()
            left_ms = None if deadline is None else (deadline - time.monotonic()) * 1000
            if not self.inbox.is_empty or (left_ms is not None and left_ms <= 0):
                break
            ready = dict(self._engine_sources.poll(left_ms))
            if self._wake_engine in ready:
                os.eventfd_read(self._wake_engine)
            if self._engine_fd in ready:  # the next call finds what clients have sent
                break
        self._engine_is_asleep = False
        if self._engine_fd < 0:
            self._hand_over()

    def _hand_over(self) -> None:
        """Let the IO thread sleep on the socket again."""
        with self._using:
            self._sources.modify(self._socket_fd, select.EPOLLIN)
        self._is_kept = False

    def _send_for_engine(self, messages: Sequence[AddressedMessage]) -> bool:
        """Send messages in the engine thread. Return False if they must wait behind others in the outbox."""
        if not self._using.acquire(blocking=False):
            return False
        try:
            if not self._outbox.empty():
                return False
            self.border.send(messages, time.monotonic())
            if self.sessions.has_unsent or self.border.has_unread:
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
        if self.border.shutdown_asked:
            self._exit(0)

    def _exit(self, code: int) -> NoReturn:
        log.flush(_LOG_S)
        os._exit(code)

    def _fail(self) -> NoReturn:
        self._router.remove_files()
        log.say(traceback.format_exc())
        log.say("engine-core: the socket could not be served; the engine process ends")
        log.flush(_LOG_S)
        os._exit(1)

    def _serve(self) -> None:
        while True:
            self._num_turns += 1
            self._using.acquire()
            due_s = self.border.round(time.monotonic())
            if self.border.shutdown_asked:
                self._stop(EngineStopping("its owner has shut it down"))
                return
            if self._stopping is not None and self._outbox.empty():
                self._stop(self._stopping)
                return
            move_s = self.border.departure.due_s(time.monotonic())
            if move_s == 0:
                self._stop(self.border.departure.last_message)
                self._exit(self.border.departure.exit_code)
            due_s = move_s if due_s is None or (move_s is not None and move_s < due_s) else due_s
            self._sleep_s = due_s  # set before the lock is released, because the engine thread compares it
            self._using.release()
            if self._engine_is_asleep and not self.inbox.is_empty:
                os.eventfd_write(self._wake_engine, 1)
            if self.border.is_behind:
                time.sleep(_PACE_S)
            self._is_asleep = True  # set before looking at the outbox, so that a later put sees it
            for fd, _ in self._sources.poll(due_s if self._outbox.empty() else 0):
                if fd == self._wake:
                    os.eventfd_read(self._wake)
            self._is_asleep = False

    def _stop(self, stopping: EngineStopping) -> None:
        self.border.close()
        now = time.monotonic()
        self.border.send_to_all(stopping, now)
        deadline = now + _FLUSH_S
        self._num_turns += 1
        while self.sessions.has_unsent and (now := time.monotonic()) < deadline:
            self._num_turns += 1
            if not self.sessions.flush(now):
                time.sleep(_RETRY_S)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._router.close()
        self._num_turns += 1
        self._context.term()  # returns when everything is sent or the socket's linger time is over
        with self._wake_lock:
            os.close(self._wake)
            self._wake = -1
