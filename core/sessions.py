"""Sessions: the clients of the engine's socket, and what waits to be sent to each of them."""

import contextlib
import os
from collections import deque
from collections.abc import Collection

import msgspec
import zmq

from ipc.sockets import Socket

MAX_SESSIONS = 4096
#: Bytes that may wait for one client beyond the socket's own queue; then the client is too slow and is dropped.
MAX_BACKLOG_BYTES = 32 << 20
MAX_NAME_CHARS = 200


class Session(msgspec.Struct, eq=False):
    """One client from its Hello to its end."""

    client: int  # number by which the engine knows it; never reused
    identity: bytes  # by which the ROUTER knows it
    fd: int  # of its connection, as the socket's monitor reports it
    name: str
    token: bytes
    backlog: deque[bytes] = msgspec.field(default_factory=deque)
    backlog_bytes: int = 0


class Sessions:
    """Owned by the IO thread, like the socket."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._by_identity: dict[bytes, Session] = {}
        self._by_client: dict[int, Session] = {}
        self._backlogged: dict[int, Session] = {}
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self._by_identity)

    @property
    def all(self) -> Collection[Session]:
        return self._by_client.values()

    @property
    def backlogged(self) -> list[Session]:
        """Those that messages wait for."""
        return list(self._backlogged.values())

    def open(self, identity: bytes, fd: int, name: str) -> Session:
        self._num_opened += 1
        session = Session(self._num_opened, identity, fd, name[:MAX_NAME_CHARS], os.urandom(16))
        self._by_identity[identity] = session
        self._by_client[session.client] = session
        return session

    def close(self, session: Session) -> None:
        del self._by_identity[session.identity]
        del self._by_client[session.client]
        self._backlogged.pop(session.client, None)

    def of_identity(self, identity: bytes) -> Session | None:
        return self._by_identity.get(identity)

    def of_client(self, client: int) -> Session | None:
        return self._by_client.get(client)

    def of_fd(self, fd: int) -> list[Session]:
        return [session for session in self.all if session.fd == fd]

    def send(self, session: Session, payload: bytes) -> bool:
        """Send, or keep for later; False when the client is gone or too slow and its session must be closed."""
        try:
            if not session.backlog and self._try_send(session.identity, payload):
                return True
        except _Unreachable:
            return False
        session.backlog.append(payload)
        session.backlog_bytes += len(payload)
        self._backlogged[session.client] = session
        return len(session.backlog) == 1 or session.backlog_bytes <= MAX_BACKLOG_BYTES

    def flush(self, session: Session) -> bool:
        """Send what waits, as far as the socket takes it; False when the client is gone."""
        try:
            while session.backlog and self._try_send(session.identity, session.backlog[0]):
                session.backlog_bytes -= len(session.backlog.popleft())
        except _Unreachable:
            return False
        if not session.backlog:
            self._backlogged.pop(session.client, None)
        return True

    def send_to_stranger(self, identity: bytes, payload: bytes) -> None:
        """To a peer without a session; nothing is kept for it."""
        with contextlib.suppress(_Unreachable):
            self._try_send(identity, payload)

    def _try_send(self, identity: bytes, payload: bytes) -> bool:
        """False when the peer's queue is full."""
        try:
            self._socket.send_multipart((identity, payload), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise _Unreachable from None
            raise
        return True


class _Unreachable(Exception):
    """The peer has left the socket."""
