"""Relay: passes the bytes between clients and a server on, unchanged and at once, and shows a copy to an observer.

Each connection of a client is one connection to the server, so this is a tunnel in the sense of RFC 9110, section 3.7:
hop-by-hop headers, chunks, trailers and upgrades mean the same on both sides and stay as they are.
"""

import asyncio
import contextlib
import os
import re
import ssl
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, cast
from urllib.parse import urlsplit

from ipc.errors import ConfigError
from tools.commands.record.exchanges import Connection, Recording
from tools.commands.record.traffic import Totals, TrafficWriter

_SHOW_S = 0.05  # in which bytes are gathered for the observer
_MAX_SHOWN = 64 << 20  # bytes that wait for the observer
_MAX_HELD = 256 << 20  # bytes of all bodies that are kept until they are complete
_CONNECT_S = 30.0
_KEY_BYTES = 32
#: Seconds after which the observer's thread gives Python's lock to the relay.
_SWITCH_S = 0.0002
_MAX_HEAD = 1 << 16
_HOST = re.compile(rb"(\r\nhost:[ \t]*)[^\r\n]*", re.I)
_BAD_GATEWAY, _BUSY = "502 Bad Gateway", "503 Service Unavailable"


class Upstream(NamedTuple):
    """The server. tls: None = it speaks plain HTTP. host_field: what requests get as Host; None = what they have."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    host_field: bytes | None = None


def parse_upstream(url: str, host_header: str | None = None) -> Upstream:
    """Return the server that a URL names. host_header: keep, upstream, or None = upstream with https.

    Errors: ConfigError.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"--upstream {url!r:.80}: {error}") from None
    if parts.scheme not in ("http", "https") or not host or parts.path not in ("", "/") or parts.query:
        raise ConfigError(
            f"--upstream must be the root of a server, such as http://127.0.0.1:8080; got {url!r:.80}. Paths are "
            "passed on as clients send them"
        )
    if parts.username is not None:
        raise ConfigError("--upstream takes no user and password: clients send their own keys, which are passed on")
    has_tls = parts.scheme == "https"
    field = parts.netloc.encode("idna") if host_header == "upstream" or (has_tls and host_header is None) else None
    if not has_tls:
        return Upstream(host, port or 80, None, field)
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return Upstream(host, port or 443, context, field)


class HostField:
    """Replaces the value of Host in each request of a connection, and changes nothing else."""

    def __init__(self, value: bytes) -> None:
        self._value = value
        self._held = b""  # the beginning of a head or of a line
        self._left = 0  # bytes of the body, or of the chunk, that follow
        self._step = self._head

    def feed(self, data: bytes) -> bytes:
        """Return what can be passed on now."""
        self._held += data
        passed = []
        while self._held and (part := self._step()):
            passed.append(part)
        return b"".join(passed)

    def _take(self, size: int) -> bytes:
        part, self._held = self._held[:size], self._held[size:]
        return part

    def _head(self) -> bytes:
        end = self._held.find(b"\r\n\r\n") + 4
        if end < 4 and len(self._held) <= _MAX_HEAD:
            return b""
        if end < 4:  # no HTTP
            self._step = self._all
            return self._all()
        head = self._take(end)
        fields = [line.partition(b":")[::2] for line in head.lower().split(b"\r\n")[1:]]
        found = {name.strip(): value.strip() for name, value in fields}
        length = found.get(b"content-length", b"")
        if b"upgrade" in found:
            self._step = self._all  # what follows may be another protocol
        elif found.get(b"transfer-encoding", b"").endswith(b"chunked"):
            self._step = self._chunk
        elif length.isdigit() and int(length[:15]):
            self._left, self._step = int(length[:15]), self._body
        return _HOST.sub(lambda match: match[1] + self._value, head, count=1)

    def _body(self) -> bytes:
        part = self._take(self._left)
        self._left -= len(part)
        if not self._left:
            self._step = self._head
        return part

    def _chunk(self) -> bytes:
        """Pass on a chunk's first line; without one: hold what there is of it."""
        end = self._held.find(b"\r\n") + 2
        if end < 2:
            return b""
        line = self._take(end)
        try:
            size = int(line.partition(b";")[0], 16)
        except ValueError:
            self._step = self._all
            return line
        self._left, self._step = size + 2, self._chunk_data if size else self._trailer
        return line

    def _chunk_data(self) -> bytes:
        part = self._body()
        if not self._left:
            self._step = self._chunk
        return part

    def _trailer(self) -> bytes:
        end = self._held.find(b"\r\n") + 2
        line = self._take(end) if end >= 2 else b""
        if line == b"\r\n":
            self._step = self._head
        return line

    def _all(self) -> bytes:
        return self._take(len(self._held))


class _Shown(NamedTuple):
    """Bytes that have passed. data: empty = the connection is closed, by `who`."""

    link: "_Link"
    from_client: bool
    now_ns: int
    data: bytes
    who: str = ""


class Observer:
    """Reads what has passed, in a thread of its own. tell: called once if the file cannot be written."""

    def __init__(self, writer: TrafficWriter, recording: Recording, tell: Callable[[str], None]) -> None:
        self._writer, self._recording, self._tell = writer, recording, tell
        self._thread = ThreadPoolExecutor(1, "observer")
        self._shown: list[_Shown] = []
        self._num_bytes = self._num_held = 0
        self._is_due = self._is_failed = False
        self._connections: dict[_Link, Connection] = {}
        self._num_others = self._num_not_understood = self._num_lost = 0
        self.num_exchanges = 0

    def show(self, shown: _Shown) -> None:
        """Take in what has passed now. Too much of it ends the reading of this connection."""
        if shown.data and self._num_bytes > _MAX_SHOWN:
            shown = shown._replace(data=b"", who="lost")
        self._shown.append(shown)
        self._num_bytes += len(shown.data)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(_SHOW_S, self._hand_over)

    def _hand_over(self) -> None:
        batch, self._shown = self._shown, []
        loop = asyncio.get_running_loop()
        loop.run_in_executor(self._thread, self._read, batch).add_done_callback(self._handed_over)

    def _handed_over(self, read: "asyncio.Future[int]") -> None:
        self._num_bytes -= read.result()
        self._is_due = bool(self._shown)
        if self._is_due:
            asyncio.get_running_loop().call_later(_SHOW_S, self._hand_over)

    def _read(self, batch: list[_Shown]) -> int:
        """Read what has passed, and return its bytes."""
        touched = dict.fromkeys(one.link for one in batch)
        ended = []
        for link in touched:
            self._connections.setdefault(link, Connection(self._recording))
        for one in batch:
            connection = self._connections[one.link]
            if one.data:
                self._feed(connection, one)
            elif one.who == "lost":
                self._give_up(connection)
            else:
                self._num_held -= connection.held
                connection.end(one.now_ns, one.who)
                ended.append(one.link)
        exchanges = [exchange for link in touched for exchange in self._connections[link].take()]
        for link in ended:
            connection = self._connections.pop(link)
            self._num_others += connection.num_others
            self._num_not_understood += not connection.is_understood
        self.num_exchanges += len(exchanges)
        if not self._is_failed:
            try:
                self._writer.add(exchanges)
            except OSError as error:
                self._is_failed = True
                self._tell(f"the recording ends here, the server goes on: {error.strerror}")
        return sum(len(one.data) for one in batch)

    def _feed(self, connection: Connection, shown: _Shown) -> None:
        before = connection.held
        connection.feed(shown.data, shown.now_ns, from_client=shown.from_client)
        self._num_held += connection.held - before
        if self._num_held > _MAX_HELD:
            self._give_up(connection)

    def _give_up(self, connection: Connection) -> None:
        self._num_lost += connection.is_understood
        self._num_held -= connection.held
        connection.give_up()

    async def read_all(self) -> None:
        """Wait until what has passed so far is read."""
        while self._is_due:
            await asyncio.sleep(_SHOW_S)

    def close(self) -> None:
        """Read the rest and close the file."""
        self._thread.shutdown()
        self._read(self._shown)
        totals = Totals(self._num_others, self._num_not_understood - self._num_lost, self._num_lost)
        with contextlib.suppress(OSError):
            self._writer.close(totals)


class _Side(asyncio.Protocol):
    """One of the two connections of a link. other: the one that gets what comes here; None: not yet connected."""

    other: "_Side | None" = None
    has_ended = False  # it sends no more
    transport: asyncio.Transport

    def __init__(self, link: "_Link", *, is_client: bool, host_field: bytes | None = None) -> None:
        self._link, self._is_client = link, is_client
        self._host_field = None if host_field is None else HostField(host_field)
        self._early: list[bytes] = []  # that came before the server was connected: one read at most

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's have other base classes
        if self._is_client:
            self._link.opened()

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early.append(data)
            self.transport.pause_reading()
            return
        if self._host_field is not None:
            data = self._host_field.feed(data)
        self.other.transport.write(data)
        self._link.passed(data, from_client=self._is_client)

    def meet(self, other: "_Side") -> None:
        """The server is connected: pass on what came before."""
        self.other = other
        early, self._early = self._early, []
        for data in early:
            self.data_received(data)
        if early:
            self.transport.resume_reading()

    def eof_received(self) -> bool:
        """Tell the other side; what it still sends is passed on."""
        self._link.closed_by(self._is_client)
        self.has_ended = True
        if self.other is None or self.other.has_ended or not self.other.transport.can_write_eof():
            return False
        with contextlib.suppress(OSError, RuntimeError):  # it is closing itself
            self.other.transport.write_eof()
        return True

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._link.lost(self._is_client, is_reset=error is not None)


class _Link:
    """A client's connection and the one to the server that belongs to it."""

    def __init__(self, relay: "Relay") -> None:
        self._relay = relay
        self._client = _Side(self, is_client=True, host_field=relay.upstream.host_field)
        self._server = _Side(self, is_client=False)
        self._who = ""
        self._is_over = False
        self._connecting: asyncio.Task[None] | None = None

    @property
    def client(self) -> _Side:
        """Return the protocol of the client's connection."""
        return self._client

    def opened(self) -> None:
        """The client is connected: connect to the server."""
        if not self._relay.admit(self):
            self._refuse(_BUSY, "too many connections to the recording proxy")
            return
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        upstream, loop = self._relay.upstream, asyncio.get_running_loop()
        name = None if upstream.tls is None else upstream.host
        try:
            async with asyncio.timeout(_CONNECT_S):
                await loop.create_connection(
                    lambda: self._server, upstream.host, upstream.port, ssl=upstream.tls, server_hostname=name
                )
        except (OSError, TimeoutError) as error:
            self._refuse(_BAD_GATEWAY, f"the recording proxy cannot reach the server: {error or 'timeout'}")
            return
        if self._client.transport.is_closing():
            self._server.transport.abort()
            return
        self._server.meet(self._client)
        self._client.meet(self._server)

    def _refuse(self, status: str, text: str) -> None:
        """Answer for the server, which cannot, and close."""
        body = b'{"error": {"message": "%b", "type": "proxy_error"}}' % text.replace('"', "'").encode()
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        transport = self._client.transport
        if not transport.is_closing():
            transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
            transport.close()
        self._end()

    def passed(self, data: bytes, *, from_client: bool) -> None:
        """Show bytes that have been passed on."""
        if not data:
            return
        self._relay.observer.show(_Shown(self, from_client, time.monotonic_ns(), data))

    def closed_by(self, is_client: bool) -> None:
        """Note which side ends the connection."""
        self._who = self._who or ("client" if is_client else "server")

    def lost(self, is_client: bool, *, is_reset: bool) -> None:
        """A side is closed: close the other one in the same way, after what it still has to send."""
        self.closed_by(is_client)
        if self._connecting is not None:
            self._connecting.cancel()
        other = self._server if is_client else self._client
        if hasattr(other, "transport") and not other.transport.is_closing():
            if is_reset:
                other.transport.abort()
            else:
                other.transport.close()
        self._end()

    def cut(self) -> None:
        """Close both sides: the proxy stops."""
        self._who = self._who or "proxy"
        for side in (self._client, self._server):
            if hasattr(side, "transport"):
                side.transport.abort()
        self._end()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._relay.observer.show(_Shown(self, False, time.monotonic_ns(), b"", self._who))
            self._relay.forget(self)


class Relay:
    """All links of a proxy."""

    def __init__(self, upstream: Upstream, observer: Observer, max_connections: int) -> None:
        self.upstream, self.observer = upstream, observer
        self._max = max_connections
        self._links: set[_Link] = set()

    def protocol(self) -> _Side:
        """Return the protocol of a client that connects."""
        return _Link(self).client

    def admit(self, link: _Link) -> bool:
        """Count a new link; return whether there is room for it."""
        if len(self._links) >= self._max:
            return False
        self._links.add(link)
        return True

    def forget(self, link: _Link) -> None:
        """A link is over."""
        self._links.discard(link)

    def cut(self) -> None:
        """Close all links."""
        for link in list(self._links):
            link.cut()


def new_recording(*, keeps_content: bool) -> Recording:
    """Return a recording that begins now, with a key of its own."""
    sys.setswitchinterval(_SWITCH_S)
    return Recording(time.monotonic_ns(), os.urandom(_KEY_BYTES), keeps_content)
