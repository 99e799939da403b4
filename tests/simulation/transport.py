"""PlayedTransport: frontend/client/transport.py's Transport over the played network, with ZmqTransport's behaviour."""

from collections import deque
from functools import partial
from typing import Protocol

from frontend.client.transport_interface import Borrower, OnDead, OnFrames, OnLost
from ipc.errors import EngineDeadError
from tests.simulation.network import Connection
from tests.simulation.world import MS, World

_RETRY_NS = 2 * MS


class Host(Protocol):
    """The process that a transport belongs to."""

    def when_running(self, do: "partial[None]") -> None:
        """Call it now, or when the process goes on."""


class PlayedTransport:
    """A client's transport. is_tcp: a cut connection is made again within grace_ns; else its loss is the end."""

    def __init__(self, world: World, host: Host, *, is_tcp: bool, grace_ns: int) -> None:
        self.connection: Connection | None = None  # None: not connected
        self.was_heard = False  # the engine has read the first frame
        self._world = world
        self._host = host
        self._is_tcp = is_tcp
        self._grace_ns = grace_ns
        self._is_over = False
        self._has_greeted = False
        self._arrived: deque[tuple[Connection, bytes]] = deque()
        self._is_reading = False
        self._lost_at_ns: int | None = None
        self._heartbeat, self._heartbeat_ns, self._sent_at_ns = b"", 0, 0
        self._num_beating = 0  # chains of heartbeats begun; the last one counts

    # --- Transport ---

    def start(self, on_frames: OnFrames, on_dead: OnDead, on_lost: OnLost) -> None:
        self._on_frames, self._on_dead, self._on_lost = on_frames, on_dead, on_lost
        if self._world.engine is None:
            raise EngineDeadError("nothing listens at the played address")
        self.connection = self._world.engine.router.connect(self)

    def send(self, frame: bytes) -> None:
        if self._is_over or self.connection is None:
            return
        self._sent_at_ns = self._world.now_ns
        if self._has_greeted:
            self.connection.up(frame)
        else:
            self._greet(frame)

    def lend(self, borrower: Borrower | None) -> None:
        raise NotImplementedError("a played client receives by itself")

    def receive(self) -> bool:
        raise NotImplementedError("a played client receives by itself")

    def keep_alive(self, frame: bytes, seconds: float) -> None:
        self._heartbeat, self._heartbeat_ns = frame, int(seconds * 1e9)
        self._num_beating += 1
        self._beat_later(self._num_beating)

    def await_return(self, seconds: float) -> None:
        pass

    def close(self) -> None:
        if not self._is_over:
            self._is_over = True
            if self.connection is not None:
                self.connection.close()

    # --- the first handshake, for which the client's constructor waits: it takes no time ---

    def _greet(self, hello: bytes) -> None:
        assert self.connection is not None
        self._has_greeted = True
        self.connection.reach_engine(hello)
        self.connection.is_instant = True
        self.was_heard = self._world.engine is not None and self._world.engine.answer_now()
        self.connection.is_instant = False
        self._read()

    # --- what arrives ---

    def arrive(self, connection: Connection, frame: bytes) -> None:
        if self._is_over or connection is not self.connection:
            return
        self._arrived.append((connection, frame))
        if not connection.is_instant and not self._is_reading:
            self._is_reading = True
            self._world.after(self._world.delay() // 4, partial(self._host.when_running, partial(self._read)))

    def _read(self) -> None:
        self._is_reading = False
        while self._arrived and not self._is_over:
            batch = []
            for _ in range(min(len(self._arrived), self._world.random.randint(1, 4))):
                connection, frame = self._arrived.popleft()
                connection.num_waiting -= 1
                batch.append(frame)
            self._lost_at_ns = None
            self._on_frames(batch)

    # --- heartbeats ---

    def _beat_later(self, chain: int) -> None:
        if self._heartbeat_ns:
            due_ns = self._sent_at_ns + self._heartbeat_ns
            self._world.at(due_ns, partial(self._host.when_running, partial(self._beat, chain)))

    def _beat(self, chain: int) -> None:
        if self._is_over or self.connection is None or chain != self._num_beating or not self._heartbeat_ns:
            return
        if self._world.now_ns - self._sent_at_ns >= self._heartbeat_ns:
            self.send(self._heartbeat)
        self._beat_later(chain)

    # --- ends ---

    def lose(self, connection: Connection, *, is_engine_dead: bool) -> None:
        """Notice the end of a connection, after all that arrived on it."""
        self._host.when_running(partial(self._lose, connection, is_engine_dead))

    def _lose(self, connection: Connection, is_engine_dead: bool) -> None:
        if self._is_over or connection is not self.connection:
            return
        self._read()
        if self._is_over:
            return
        if not self._is_tcp:
            text = "the engine process has ended" if is_engine_dead else "the engine closed the connection"
            self._die(text)
            return
        self.connection = None
        self._arrived.clear()
        retry_ns = 0 if self._lost_at_ns is None else _RETRY_NS
        if self._lost_at_ns is None:
            self._lost_at_ns = self._world.now_ns
            self._world.after(self._grace_ns, partial(self._host.when_running, partial(self._end_grace)))
        self._heartbeat_ns = 0
        self._connect_later(self._on_lost(), retry_ns)

    def _connect_later(self, hello: bytes, retry_ns: int) -> None:
        delay_ns = self._world.delay() + retry_ns
        self._world.after(delay_ns, partial(self._host.when_running, partial(self._connect, hello)))

    def _connect(self, hello: bytes) -> None:
        if self._is_over or self.connection is not None:
            return
        if self._world.engine is None:
            self._connect_later(hello, _RETRY_NS)
            return
        self.connection = self._world.engine.router.connect(self)
        self.connection.up(hello)

    def _end_grace(self) -> None:
        if self._is_over or self._lost_at_ns is None:
            return
        left_ns = self._lost_at_ns + self._grace_ns - self._world.now_ns
        if left_ns > 0:  # it was lost anew
            self._world.after(left_ns, partial(self._host.when_running, partial(self._end_grace)))
        else:
            self._die("the engine closed the connection and did not answer again in time")

    def _die(self, reason: str) -> None:
        self.close()
        self._on_dead(reason)
