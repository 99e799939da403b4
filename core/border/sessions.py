"""Sessions: the clients of the engine's socket, their unsent messages, and how slow readers are handled.

A client that reads too slowly costs other clients nothing. First its outputs are merged (core/border/backlog.py). Above
HOLD_BYTES its requests are put on hold. Above MAX_BACKLOG_BYTES, or after HOLD_S, its session ends with a last message
that gives the reason.
"""

import contextlib
import fcntl
import os
import termios
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping

import msgspec
import zmq

from core.border.accounts import Account
from core.border.backlog import Backlog
from core.border.inbox import MAX_ABORTED_AT_ONCE, Inbox
from core.border.key_use import KeyUse
from core.border.ledger import MAX_FINISHED, RequestLedger
from core.inputs import HoldClient, ReleaseClient, RenewKVEvents, SetClientWeight
from ipc.wire.kv_events import KVBlocksCleared
from ipc.wire.messages import Abort, ErrorCode, Goodbye, Refused, ServerMessage, encode
from ipc.wire.scheduling_messages import KVEvents
from ipc.wire.sockets import Socket

MAX_SESSIONS = 4096
#: Bytes waiting for one client, beyond the socket's own queue, at which its requests are put on hold ...
HOLD_BYTES = 1 << 20
#: ... at which they resume ...
RELEASE_BYTES = HOLD_BYTES // 4
#: ... and at which the session ends, because even what is not held (answers to calls) is too much.
MAX_BACKLOG_BYTES = 8 << 20
HOLD_S = 30.0  # seconds on hold after which the session ends
DRAIN_HOLD_S = 5.0  # the same while the engine drains: a service manager does not wait long
#: Bytes given to the socket for one client since it was last seen to have read everything. More waits in the backlog.
MAX_UNREAD_BYTES = 1 << 20
MAX_NAME_CHARS = 200
_MORE_FOLLOWS = zmq.SNDMORE | zmq.NOBLOCK
MAX_TENANTS = 4096  # number of accounts above which those without live requests are dropped


class Session(msgspec.Struct, eq=False):
    """One client, from its Hello to its end."""

    client: int  # its number in the engine; never reused
    identity: bytes  # its ZeroMQ identity
    fd: int  # of its connection, as the socket's monitor reports it
    name: str
    token: bytes
    is_owner: bool
    has_lease: bool  # the session ends after one lease period without a message
    seen: float  # time of its last message, on the lease clock
    backlog: Backlog = msgspec.field(default_factory=Backlog)
    requests: RequestLedger = msgspec.field(default_factory=RequestLedger)
    use: KeyUse | None = None  # use of its key; None: it has none
    malformed: deque[float] = msgspec.field(default_factory=deque)  # when its latest malformed messages arrived
    num_tokenizers: int = 0  # how often the tokenizer was sent
    num_calls: int = 0  # unanswered calls
    resumable: set[int] = msgspec.field(default_factory=set)  # numbers from its lost session: never refused
    num_restorable: int = 0  # how many of its first requests were accepted by another engine: never refused
    returning_until: float = 0.0  # monotonic; until then a draining engine waits for both
    held_since: float | None = None  # monotonic; its requests are on hold since then
    num_unread: int = 0  # bytes sent since the client was last seen to have read everything
    has_kv_gap: bool = False  # KV events were dropped; a new snapshot starts when everything that waits is sent


class Sessions:
    """The sessions of one socket. Use it with the socket's lock held (core/border/io_thread.py).

    weights: clients' shares by name, for policy fair.
    """

    def __init__(self, socket: Socket, inbox: Inbox, weights: Mapping[str, float]) -> None:
        self.num_dropped = 0  # sessions ended for not reading
        self.is_draining = False
        self.has_read_all = has_read_all  # for a connection's file descriptor
        self.on_close: list[Callable[[int], None]] = []  # called with each client whose session closes
        self._tenants: dict[str, Account] = {}  # of tenants with live requests
        self._socket = socket
        self._inbox = inbox
        self._weights = weights
        self._by_identity: dict[bytes, Session] = {}
        self._by_client: dict[int, Session] = {}
        self._backlogged: dict[int, Session] = {}
        # request numbers of sessions that were cut off, by token
        self._lost: OrderedDict[bytes, set[int]] = OrderedDict()
        self._farewells: dict[bytes, bytes] = {}  # last frames of ended sessions, by identity
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self._by_identity)

    @property
    def all(self) -> Collection[Session]:
        """Return the live sessions."""
        return self._by_client.values()

    @property
    def has_unsent(self) -> bool:
        """Return whether frames are waiting because a client's queue is full."""
        return bool(self._backlogged or self._farewells)

    def open(
        self, identity: bytes, fd: int, name: str, *, is_owner: bool, has_lease: bool, lease_time: float
    ) -> Session:
        """Open a session for a connection. fd: its file descriptor; lease_time: now, on the lease clock."""
        self._num_opened += 1
        session = Session(
            client=self._num_opened,
            identity=identity,
            fd=fd,
            name=name[:MAX_NAME_CHARS],
            token=os.urandom(16),
            is_owner=is_owner,
            has_lease=has_lease,
            seen=lease_time,
        )
        self._by_identity[identity] = session
        self._by_client[session.client] = session
        if session.name in self._weights:
            self._inbox.put(session.client, SetClientWeight(self._weights[session.name]))
        return session

    def close(self, session: Session) -> None:
        """Close a session; a Goodbye makes the engine abort its requests. Closing it twice does nothing."""
        if self._by_client.pop(session.client, None) is None:
            return
        del self._by_identity[session.identity]
        self._backlogged.pop(session.client, None)
        for tell in self.on_close:
            tell(session.client)
        live = session.requests.live()
        session.requests.close()
        if len(live) > MAX_ABORTED_AT_ONCE:  # the Goodbye would end all of them in one step
            self._inbox.put_abort(session.client, Abort(live.astype("<u4").tobytes()))
        self._inbox.put(session.client, Goodbye())

    def lose(self, session: Session) -> None:
        """Close the session of a client that was cut off and may come back."""
        if session.client in self._by_client:
            if len(session.resumable) > MAX_FINISHED:  # many losses in a row: drop what was not sent again
                session.resumable = set()
            session.resumable |= session.requests.unconfirmed()
            if session.resumable:
                self._lost[session.token] = session.resumable
            if len(self._lost) > MAX_SESSIONS:
                self._lost.popitem(last=False)
        self.close(session)

    def are_all_back(self, now: float) -> bool:
        """Return whether every client that came back has resent what it had, or has run out of time for that."""
        return not any(
            session.returning_until > now and (session.resumable or session.num_restorable) for session in self.all
        )

    def resumable_after(self, token: bytes) -> set[int]:
        """Return the numbers of the requests that the client of a lost session may send again.

        All sessions with this token share one set, so that each request is accepted again only once. A client whose new
        connection is cut before the Welcome arrives uses the old token again.
        """
        return self._lost.get(token, set())

    def end(self, session: Session, code: ErrorCode, text: str) -> None:
        """Close the session from this side. Its client gets the reason when it reads again."""
        self.close(session)
        self._farewells[session.identity] = encode(Refused(code, text))
        self._say_farewells()

    def of_identity(self, identity: bytes) -> Session | None:
        """Return the session of this ZeroMQ identity."""
        return self._by_identity.get(identity)

    def of_client(self, client: int) -> Session | None:
        """Return the session of this client number."""
        return self._by_client.get(client)

    def of_fd(self, fd: int) -> list[Session]:
        """Return the sessions over the connection with this file descriptor."""
        return [session for session in self.all if session.fd == fd]

    def of_token(self, token: bytes) -> list[Session]:
        """Return the sessions with this token."""
        return [session for session in self.all if session.token == token]

    def tenant(self, name: str) -> Account:
        """Return a tenant's account over all sessions. It is kept as long as the tenant has live requests."""
        account = self._tenants.get(name)
        if account is None:
            if len(self._tenants) >= MAX_TENANTS:
                self._tenants = {name: one for name, one in self._tenants.items() if one.num_requests}
            account = self._tenants[name] = Account()
        return account

    def busy_tenants(self) -> Iterator[str]:
        """Yield the tenants that have live requests."""
        return (name for name, one in self._tenants.items() if one.num_requests)

    # --- sending ---

    def send(self, session: Session, message: ServerMessage, now: float) -> None:
        """Send a message, or keep it until the client reads.

        If the client is gone, its session is lost; if it is too slow, its session is ended. KV events are not kept: the
        client gets a snapshot instead of those that it did not read.
        """
        backlog = session.backlog
        if session.client in self._backlogged:
            if backlog.num_bytes > MAX_BACKLOG_BYTES:
                self._drop(session, f"{backlog.num_bytes} bytes were waiting for this client, which did not read")
                return
        else:
            try:
                if self._may_send(session) and self._send_to(session, encode(message)):
                    return
            except _Unreachable:
                self.lose(session)
                return
            self._backlogged[session.client] = session
        if not isinstance(message, KVEvents):
            backlog.append(message)
        elif not session.has_kv_gap:
            session.has_kv_gap = True
            backlog.append(msgspec.structs.replace(message, events=[KVBlocksCleared()], gap=True))
        if backlog.num_bytes > HOLD_BYTES and session.held_since is None:
            session.held_since = now
            self._inbox.put(session.client, HoldClient())

    def flush(self, now: float) -> bool:
        """Send waiting messages as far as the socket accepts them. Return whether it accepted any."""
        progress = self._say_farewells()
        for session in list(self._backlogged.values()):
            progress |= self._flush(session)
            hold_s = min(HOLD_S, DRAIN_HOLD_S) if self.is_draining else HOLD_S
            if session.held_since is not None and now - session.held_since > hold_s:
                self._drop(session, f"this client did not read for {hold_s:g} s while output was waiting")
        return progress

    def _flush(self, session: Session) -> bool:
        backlog, progress = session.backlog, False
        try:
            while self._may_send(session) and (frame := backlog.head()) is not None and self._send_to(session, frame):
                backlog.pop_head()
                progress = True
        except _Unreachable:
            self.lose(session)
            return True
        if backlog.num_bytes == 0:
            self._backlogged.pop(session.client)
            if session.has_kv_gap:
                session.has_kv_gap = False
                self._inbox.put(session.client, RenewKVEvents())
        if session.held_since is not None and backlog.num_bytes <= RELEASE_BYTES:
            session.held_since = None
            self._inbox.put(session.client, ReleaseClient())
        return progress

    def _may_send(self, session: Session) -> bool:
        """Return whether more may be given to the socket for this client.

        The socket counts messages, but a message may be tens of megabytes.
        """
        if session.num_unread > MAX_UNREAD_BYTES and self.has_read_all(session.fd):
            session.num_unread = 0
        return session.num_unread <= MAX_UNREAD_BYTES

    def _send_to(self, session: Session, frame: bytes) -> bool:
        is_sent = self._try_send(session.identity, frame)
        session.num_unread += len(frame) if is_sent else 0
        return is_sent

    def _drop(self, session: Session, text: str) -> None:
        self.num_dropped += 1
        self.end(session, ErrorCode.RESOURCE_EXHAUSTED, f"{text}; its requests were aborted")

    def _say_farewells(self) -> bool:
        said = []
        for identity, frame in self._farewells.items():
            try:
                if self._try_send(identity, frame):
                    said.append(identity)
            except _Unreachable:
                said.append(identity)
        for identity in said:
            del self._farewells[identity]
        return bool(said)

    def send_to_stranger(self, identity: bytes, message: ServerMessage) -> None:
        """Send a message to a peer without a session. It is dropped if the peer's queue is full."""
        with contextlib.suppress(_Unreachable):
            self._try_send(identity, encode(message))

    def _try_send(self, identity: bytes, payload: bytes) -> bool:
        """Send a frame; return False if the peer's queue is full. Errors: _Unreachable."""
        try:
            self._socket.send(identity, _MORE_FOLLOWS)
            self._socket.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise _Unreachable from None
            raise
        return True


def has_read_all(fd: int) -> bool:
    """Return whether everything written to this connection has been read. For a closed connection: True.

    On tcp, what the peer's system has accepted counts as read, because it is no longer in this process.
    """
    unread = bytearray(4)
    try:
        fcntl.ioctl(fd, termios.TIOCOUTQ, unread)
    except OSError:
        return True
    return not any(unread)


class _Unreachable(Exception):
    """Error when sending to a peer that has left the socket."""
