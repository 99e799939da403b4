"""FleetTransport: a fleet in the client's own process, instead of a connection to one engine.

The thread that sends a frame runs the fleet under its lock, so that a request goes to its replica without another
thread. A separate thread, or an event loop that borrows its role, receives from the replicas.
"""

import logging
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence

from frontend.client.transport_interface import Borrower, OnDead, OnFrames, OnLost
from frontend.fleet.driver import Driver
from frontend.fleet.fleet import Fleet
from frontend.fleet.links import Links
from frontend.fleet.membership import fleet_welcome
from frontend.fleet.replicas import ReplicaState
from ipc.wire.call import Call
from ipc.wire.feature_messages import PutFeature
from ipc.wire.messages import Abort, AddRequest, Goodbye, Heartbeat, Hello, ServerMessage, decode_client_message, encode
from ipc.wire.pooling_messages import AddPooling
from ipc.wire.sockets import check_address

_CLIENT = 1  # the only one
_OTHERS_S = 1.0  # time for further replicas to answer
_MISSING = (ReplicaState.CONNECTING, ReplicaState.LOST)

_log = logging.getLogger(__name__)


class FleetTransport:
    """A Transport to several engines of one model. addresses: theirs. route, seed: see Fleet.

    The client is the fleet's owner: it may pause, resume and stop its own requests, and let replicas join and leave.
    """

    def __init__(self, addresses: Sequence[str], *, route: str = "prefix", seed: int = 0, name: str = "") -> None:
        for address in addresses:
            check_address(address, binding=False)
        self._addresses = list(addresses)
        self._fleet = Fleet(policy=route, seed=seed, name=name or f"pid {os.getpid()}")
        self._serving = threading.Lock()  # held from the receipt of frames until on_frames returns; taken before _using
        self._using = threading.Lock()  # guards fleet and links
        self._queue: deque[bytes] = deque()  # frames sent while another thread used the fleet
        self._borrower: Borrower | None = None
        self._failure: BaseException | None = None  # of a borrower's receive()
        self._hello_at: float | None = None  # when the client's Hello arrived, until it is answered; monotonic seconds
        self._closed = False
        self._due = 0.0  # when the fleet must be called again; monotonic seconds
        self._wake_fd = -1
        self._thread: threading.Thread | None = None

    def start(self, on_frames: OnFrames, on_dead: OnDead, on_lost: OnLost) -> None:
        """Start to connect, and start the thread; see Transport. The fleet itself is never lost."""
        self._on_frames, self._on_dead = on_frames, on_dead
        self._links = Links()
        self._driver = Driver(self._fleet, self._links)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._close_wake_fd = weakref.finalize(self, os.close, self._wake_fd)
        for address in self._addresses:
            self._fleet.membership.join(address)
        self._driver.carry_out(time.monotonic())
        self._thread = threading.Thread(target=self._run, name="fleet-client-io", daemon=True)
        self._thread.start()

    def send(self, frame: bytes) -> None:
        """Pass a frame to the fleet; see Transport."""
        if self._closed:
            return
        # A finalizer or a signal handler may send during another send of the same thread.
        if self._queue or not self._using.acquire(blocking=False):
            self._queue.append(frame)
            self._wake()
            return
        try:
            now = time.monotonic()
            self._take(frame, now)
            self._driver.carry_out(now)
            has_news = bool(self._fleet.to_clients) or self._links.has_unread or self._hello_at is not None
        finally:
            self._using.release()
        if has_news or self._queue:
            self._wake()

    def keep_alive(self, frame: bytes, seconds: float) -> None:
        """Do nothing: this fleet has no lease."""

    def await_return(self, seconds: float) -> None:
        """Do nothing: the fleet waits for its replicas by itself."""

    def lend(self, borrower: Borrower | None) -> None:
        """Let an event loop receive; see Transport."""
        if not self._closed:
            self._borrower = borrower
            if borrower is not None:
                borrower.watch(os.dup(self._links.fd))
            os.eventfd_write(self._wake_fd, 1)

    def receive(self) -> bool:
        """Receive instead of the thread; see Transport."""
        try:
            return self._serve()
        except Exception as error:
            self._failure = error
            os.eventfd_write(self._wake_fd, 1)
            return False

    def close(self) -> None:
        """Stop the thread and close the connections, and wait for it, unless it is the caller."""
        self._closed = True
        if self._thread is None or not self._close_wake_fd.alive:
            return
        os.eventfd_write(self._wake_fd, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._close_wake_fd()

    # --- under the lock -----------------------------------------------------------------------------------------

    def _take(self, frame: bytes, now: float) -> None:
        """Pass a frame of the client to the fleet."""
        message = decode_client_message(frame)
        match message:
            case AddRequest() | AddPooling():
                self._fleet.submit(_CLIENT, message, now)
            case PutFeature():
                pass  # fleet_welcome() offers no features
            case Abort():
                self._fleet.abort(_CLIENT, message)
            case Hello():
                self._hello_at = now
            case Goodbye():
                self._fleet.leave(_CLIENT)
            case Heartbeat():
                pass
            case Call():
                self._fleet.call(_CLIENT, message, now)

    def _greet(self, now: float) -> list[bytes]:
        """Return the answer to a waiting Hello, once the replicas have answered or had the time to."""
        fleet, model = self._fleet, self._fleet.membership.model
        if self._hello_at is None or model is None or not fleet.replicas.sessions:
            return []
        is_one_missing = any(one.state in _MISSING for one in fleet.replicas.by_row.values())
        if is_one_missing and now - self._hello_at < _OTHERS_S:
            return []
        self._hello_at = None
        names = {"engine_id": os.urandom(8).hex(), "session_token": os.urandom(16)}
        return [encode(fleet_welcome(model, fleet.replicas.sessions, **names))]

    # --- the thread, or who has borrowed its place --------------------------------------------------------------

    def _wake(self) -> None:
        if self._borrower is None:
            os.eventfd_write(self._wake_fd, 1)
        else:
            self._borrower.look()

    def _serve(self) -> bool:
        """Take in what has arrived and pass on what is for the client; return whether there is more."""
        with self._serving:
            with self._using:
                if self._closed:
                    return False
                now = time.monotonic()
                while self._queue:
                    self._take(self._queue.popleft(), now)
                self._driver.look()
                self._driver.take_in(now)
                self._driver.carry_out(now)
                self._due = self._driver.pass_time(now)
                messages: list[ServerMessage] = [message for _, message in self._fleet.take_messages()]
                frames = [*self._greet(now), *map(encode, messages)]
                has_more = self._links.has_unread or bool(self._queue)
            if frames:
                self._on_frames(frames)
        return has_more

    def _run(self) -> None:
        reason = ""
        try:
            self._run_until_closed()
        except Exception as error:  # without a report, every caller would wait forever
            _log.exception("the thread of a fleet's client failed")
            reason = f"the client's IO thread failed: {type(error).__name__}: {error}"
        asked, self._closed = self._closed, True
        with self._using:
            self._driver.carry_out(time.monotonic())
            self._links.end()
        if reason and not asked:
            self._on_dead(reason)

    def _run_until_closed(self) -> None:
        poller, is_lent, has_more = select.poll(), False, True
        poller.register(self._wake_fd, select.POLLIN)
        poller.register(self._links.fd, select.POLLIN)
        while not self._closed:
            left_ms = 0.0 if has_more else max(0.0, (self._due - time.monotonic()) * 1000) + 1
            if self._hello_at is not None or self._fleet.has_unfinished:
                left_ms = min(left_ms, 100.0)
            for fd, _ in poller.poll(min(left_ms, 5000.0)):
                if fd == self._wake_fd:
                    os.eventfd_read(self._wake_fd)
            if self._failure is not None:
                raise self._failure
            if is_lent is not (self._borrower is not None):
                is_lent = not is_lent
                if is_lent:
                    poller.unregister(self._links.fd)
                else:
                    poller.register(self._links.fd, select.POLLIN)
            has_more = self._serve() and not is_lent
