"""The played network: the engine's ROUTER socket, its monitor, and connections whose frames take time and can be lost.

Frames of one connection and direction arrive in order. What is played is what core/border/socket_rounds.py uses of
ZeroMQ.
"""

import itertools
import struct
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import zmq

from ipc.wire.messages import Abort, AddRequest, Outputs
from tests.simulation.witness import Witness
from tests.simulation.world import World

_FIRST_FD = 10
_ARRAY_16 = 0xDC  # the first byte of a msgpack array of more than 15 fields; two bytes of its length follow
#: Messages that may arrive twice: those that the protocol promises to bear.
_UP_TAGS = (AddRequest.__struct_config__.tag, Abort.__struct_config__.tag)
_DOWN_TAGS = (Outputs.__struct_config__.tag,)


class Receiver(Protocol):
    """The client's end of a connection."""

    def arrive(self, connection: "Connection", frame: bytes) -> None: ...

    def lose(self, connection: "Connection", *, is_engine_dead: bool) -> None: ...


class Connection:
    """One connection between a client and an engine's socket. capacity: frames that wait for the client in the socket's
    queue before a send is refused."""

    def __init__(self, world: World, router: "Router", receiver: Receiver, fd: int, serial: int, capacity: int) -> None:
        self.identity = b"\0" + serial.to_bytes(4, "big")
        self.fd = fd
        self.is_cut = False  # nothing passes any more, whoever has noticed
        self.is_instant = False  # during the first handshake, for which a client's constructor waits
        self.num_waiting = 0  # frames that the socket has taken and the client has not
        self.capacity = capacity
        self.slow_until_ns = 0  # nothing that is sent arrives at the client before
        self._world = world
        self._router = router
        self._receiver = receiver
        self._up_at_ns = self._down_at_ns = 0  # when the last frame arrives

    def up(self, frame: bytes) -> None:
        """Carry a frame to the engine."""
        self._up_at_ns = max(self._up_at_ns, self._world.now_ns + self._world.delay())
        for _ in range(self._num_copies(frame, _UP_TAGS)):
            self._world.at(self._up_at_ns, partial(self.reach_engine, frame))

    def reach_engine(self, frame: bytes) -> None:
        if not self.is_cut:
            self._router.arrive(self, frame)

    def down(self, frame: bytes) -> None:
        """Carry a frame, which the engine's socket has taken, to the client."""
        self.num_waiting += 1
        if self.is_instant:
            self._receiver.arrive(self, frame)
            return
        earliest_ns = max(self._world.now_ns + self._world.delay(), self.slow_until_ns)
        self._down_at_ns = max(self._down_at_ns, earliest_ns)
        self._world.at(self._down_at_ns, partial(self._reach_client, frame))
        if self._num_copies(frame, _DOWN_TAGS) == 2:
            self.num_waiting += 1
            self._world.at(self._down_at_ns, partial(self._reach_client, frame))

    def _reach_client(self, frame: bytes) -> None:
        if not self.is_cut:
            self._receiver.arrive(self, frame)

    def _num_copies(self, frame: bytes, tags: tuple[object, ...]) -> int:
        tag = frame[3 if frame[0] == _ARRAY_16 else 1]
        if tag in tags and self._world.chance(self._world.duplicate_share):
            self._world.count("frame delivered twice")
            return 2
        return 1

    # --- ends ---

    def cut(self, engine_notices_ns: int, client_notices_ns: int) -> None:
        """Lose what is on its way; each side notices after so long."""
        self.is_cut = True
        self._world.after(engine_notices_ns, self._engine_notices)
        self._world.after(client_notices_ns, partial(self._receiver.lose, self, is_engine_dead=False))

    def close(self) -> None:
        """Close it from the client's side; what the client sent still arrives."""
        if not self.is_cut:
            self._world.at(max(self._up_at_ns, self._world.now_ns) + self._world.delay(), self._closed)

    def _closed(self) -> None:
        self.is_cut = True
        self._engine_notices()

    def vanish(self, noticed_ns: int) -> None:
        """Lose the client's machine; the engine notices after so long."""
        self.is_cut = True
        self._world.after(noticed_ns, self._engine_notices)

    def engine_died(self, *, loses_frames: bool) -> None:
        """Close it from the engine's side. loses_frames: what the engine sent last does not arrive."""
        noticed_ns = self._world.now_ns + self._world.delay()
        if self.is_cut or loses_frames:
            self.is_cut = True
        else:
            noticed_ns = max(noticed_ns, self._down_at_ns)
        self._world.at(noticed_ns, partial(self._receiver.lose, self, is_engine_dead=True))

    def _engine_notices(self) -> None:
        self._router.disconnect(self)


class Frame:
    """The part of a zmq.Frame that Reception uses."""

    more = False

    def __init__(self, buffer: bytes, fd: int) -> None:
        self.buffer = buffer
        self._fd = fd

    def get(self, option: int) -> int:
        assert option == zmq.SRCFD, option
        return self._fd


class Router:
    """The part of a ROUTER socket with ROUTER_MANDATORY, and of its monitor, that Border and Sessions use."""

    def __init__(
        self, world: World, capacity: int, on_message: Callable[[], None], on_disconnect: Callable[[], None]
    ) -> None:
        """on_message: called when there is something to read; on_disconnect: when the monitor has an event."""
        self._world = world
        self._capacity = capacity
        self._on_message = on_message
        self._on_disconnect = on_disconnect
        self._peers: dict[bytes, Connection] = {}
        self._arrived: deque[tuple[Connection, bytes]] = deque()
        self._ended: deque[int] = deque()  # file descriptors of connections, as the monitor reports them
        self._addressee: Connection | None = None
        self._frame: Frame | None = None
        self._serials = itertools.count(1)
        self.witness = Witness()
        self.is_closed = False

    def connect(self, receiver: Receiver) -> Connection:
        used = {peer.fd for peer in self._peers.values()}
        fd = next(fd for fd in itertools.count(_FIRST_FD) if fd not in used)  # the kernel's choice: one just freed
        connection = Connection(self._world, self, receiver, fd, next(self._serials), self._capacity)
        self._peers[connection.identity] = connection
        return connection

    def arrive(self, connection: Connection, frame: bytes) -> None:
        if self.is_closed or connection.identity not in self._peers:
            return
        self._arrived.append((connection, frame))
        self._on_message()

    def disconnect(self, connection: Connection) -> None:
        """Close the engine's side of a connection; messages that have arrived can still be read."""
        if self._peers.pop(connection.identity, None) is not None and not self.is_closed:
            self._ended.append(connection.fd)
            self._on_disconnect()

    def close(self, *, loses_frames: bool) -> None:
        """Close all connections, because the engine process has ended."""
        self.is_closed = True
        for connection in self._peers.values():
            connection.engine_died(loses_frames=loses_frames)

    # --- zmq.Socket ---

    def recv(self, flags: int = 0, copy: bool = True) -> bytes | Frame:
        if not copy:
            assert self._frame is not None
            return self._frame
        if not self._arrived:
            raise zmq.Again
        connection, frame = self._arrived.popleft()
        self._frame = Frame(frame, connection.fd)
        self.witness.hear(connection.identity, frame)
        return connection.identity

    def send(self, data: bytes, flags: int) -> None:
        if flags & zmq.SNDMORE:
            self._addressee = self._peers.get(data)
            if self._addressee is None:
                raise zmq.ZMQError(zmq.EHOSTUNREACH)
            if self._addressee.num_waiting >= self._addressee.capacity:
                raise zmq.Again
            return
        assert self._addressee is not None
        self.witness.say(self._addressee.identity, data)
        self._addressee.down(data)

    def get(self, option: int) -> int:
        assert option == zmq.EVENTS, option
        return zmq.POLLIN if self._arrived else 0

    # --- its monitor ---

    def poll(self, timeout: int) -> int:
        return zmq.POLLIN if self._ended else 0

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        return [struct.pack("=Hi", zmq.EVENT_DISCONNECTED, self._ended.popleft()), b"played"]
