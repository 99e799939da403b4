"""HttpProtocol: one HTTP/1.1 connection, with bounds on what a peer may send and how slowly.

httptools parses. What is beyond a bound gets its error at once, before it is read, and the connection is closed. Time
is judged by one sweep each second over all connections, so that a connection costs no timer. Requests of one connection
are answered in their order; while a later one waits, nothing is read.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import Any, Protocol
from urllib.parse import unquote

import httptools
import msgspec

from frontend.http.errors import HttpError
from frontend.http.request import JSON, Request
from frontend.http.wire.exchange import Exchange
from frontend.http.wire.head import Heads

MAX_HEAD_BYTES = 65_536
MAX_FIELDS = 100
_MAX_SHARE = 16  # bytes that may come for each byte of a body, beside those of a head: a chunk of one byte has 6
MAX_PIPELINED = 32  # requests of one connection that wait for the answer before theirs
_HEAD_S = 10.0  # from a head's first byte to its last
IDLE_S = 75.0  # of a connection without a request: longer than clients keep one in their pools
_BODY_GRACE_S = 10.0
_MIN_BODY_RATE = 1024  # bytes/s, after the grace
_LINGER_S = 2.0  # from the last byte of an answer to the end of a connection that takes no more requests
_LAST_BYTES_S = 60.0  # for a peer to read that last byte


class Bounds(msgspec.Struct, frozen=True):
    """Bounds that the owner of the server chooses."""

    max_body_bytes: int
    max_connections: int


class Answerer(Protocol):
    """What a connection asks of the application."""

    def judge(self, request: Request) -> None:
        """Judge a request by its head. Errors: HttpError."""

    def answer(self, request: Request) -> None:
        """Answer a request that is complete, or was refused by judge()."""


class _Phase(Enum):
    IDLE = 0  # between requests
    HEAD = 1
    BODY = 2


class HttpProtocol(asyncio.Protocol):
    """See the module's docstring. connections: all that are open, which this one joins and leaves."""

    def __init__(self, app: Answerer, bounds: Bounds, heads: Heads, connections: "dict[HttpProtocol, None]") -> None:
        self.is_full = False
        self.heads = heads
        self._app, self._bounds, self._connections = app, bounds, connections
        self._parser = httptools.HttpRequestParser(self)
        self._requests: deque[Request] = deque()  # the first is being answered
        self._reading: Request | None = None  # whose body is being read
        self._phase = _Phase.IDLE
        self._began = time.monotonic()  # of the wait, the head or the body that is being read
        self._url = b""
        self._fields: dict[bytes, bytes] = {}
        self._num_fields = self._num_hosts = self._head_bytes = self._body_bytes = self._read_bytes = 0
        self._error: HttpError | None = None  # of the refusal that closes the connection
        self._is_paused = False
        self._ignores = False  # what comes is not for this server: a refusal was written, or a last request is complete
        self.transport: asyncio.Transport

    # --- the peer sends -----------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Count the connection; refuse it above the bound."""
        self.transport = transport
        self._connections[self] = None
        if len(self._connections) > self._bounds.max_connections:
            self._refuse(HttpError(503, f"the server has {self._bounds.max_connections} connections, its limit"))
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Parse what came, up to the first bound that it breaks."""
        if self._ignores:
            return
        phase, began = self._phase, self._began
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # the request is answered as if it had not asked; nothing follows it
            self._end_after_this()
        except httptools.HttpParserError:
            if not self._ignores:
                self._refuse(self._error or HttpError(400, "this is not a valid HTTP/1.1 request"))
            return
        if self._phase is phase and self._began == began and not self._ignores:  # all of it is of one head, or body
            self._count_read(len(data))

    def on_message_begin(self) -> None:
        """Begin a head."""
        self._phase, self._began = _Phase.HEAD, time.monotonic()
        self._url, self._fields = b"", {}
        self._num_fields = self._num_hosts = self._head_bytes = self._body_bytes = self._read_bytes = 0

    def on_url(self, url: bytes) -> None:
        """Take a part of the target."""
        self._url += url
        if len(self._url) > MAX_HEAD_BYTES:
            raise self._broken(431, f"the request's head is longer than {MAX_HEAD_BYTES} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a field, up to MAX_FIELDS; those behind a body are counted only."""
        self._num_fields += 1
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise self._broken(431, f"the request's head is longer than {MAX_HEAD_BYTES} bytes")
        if self._num_fields > MAX_FIELDS:
            raise self._broken(431, f"the request has more than {MAX_FIELDS} header fields")
        if self._phase is _Phase.HEAD:
            name = name.lower()
            self._num_hosts += name == b"host"
            self._fields[name] = value

    def on_headers_complete(self) -> None:
        """Judge the head; what is wrong is answered without the body."""
        self._phase, self._began = _Phase.BODY, time.monotonic()
        length = int(self._fields.get(b"content-length", b"0"))  # the parser has read it as a number
        if length > self._bounds.max_body_bytes:
            raise self._broken(413, f"the body has {length} bytes; {self._bounds.max_body_bytes} are allowed")
        if len(self._requests) > MAX_PIPELINED:
            raise self._broken(400, f"more than {MAX_PIPELINED} requests wait on this connection")
        request = self._reading = self._read_head()
        self._requests.append(request)
        if len(self._requests) > 1 and not self._is_paused:
            self._is_paused = True
            if not self.is_full:
                self.transport.pause_reading()
        try:
            self._app.judge(request)
        except HttpError as error:
            request.refusal = error
            if _waits_to_send(request):  # without a yes, what it sends next may be the body or another request
                request.exchange.keep_alive = False
        if request is self._requests[0]:
            self._begin(request)

    def on_body(self, body: bytes) -> None:
        """Take a part of a body, up to the bound."""
        self._body_bytes += len(body)
        if self._body_bytes > self._bounds.max_body_bytes:
            raise self._broken(413, f"the body is longer than {self._bounds.max_body_bytes} bytes")
        assert self._reading is not None, self._phase
        if self._reading.refusal is None:
            self._reading.parts.append(body)

    def on_message_complete(self) -> None:
        """End a request; the next bytes are another head."""
        request, self._reading = self._reading, None
        assert request is not None, self._phase
        self._phase, self._began = _Phase.IDLE, time.monotonic()
        request.exchange.is_received = True
        if not self._parser.should_keep_alive():
            self._ignores = True
        if request.refusal is None and self._requests and request is self._requests[0]:
            self._app.answer(request)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever answers."""
        self._connections.pop(self, None)
        self._ignores = True
        requests, self._requests = self._requests, deque()
        for request in requests:
            request.exchange.leave()

    # --- the peer reads -----------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """Read nothing of a peer that reads too slowly: the answers to what it sends would wait here."""
        self.is_full = True
        if not self._is_paused:
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        """Read again, and tell the reply that waited."""
        self.is_full = False
        if not self._is_paused:
            self.transport.resume_reading()
        if self._requests:
            exchange = self._requests[0].exchange
            wake, exchange.on_writable = exchange.on_writable, None
            if wake is not None:
                wake()

    def send(self, data: bytes) -> None:
        """Write bytes."""
        self.transport.write(data)

    def complete(self, exchange: Exchange) -> None:
        """Go on behind a complete answer: with the next request, or with the end of the connection."""
        if self._requests:
            self._requests.popleft()
        self._began = time.monotonic()
        if not exchange.keep_alive:
            self._ignores = True
            self._close_softly()
            return
        if self._is_paused and len(self._requests) < 2:
            self._is_paused = False
            if not self.is_full:
                self.transport.resume_reading()
        if self._requests:
            self._begin(self._requests[0])
        elif self._error is not None:
            self._write_error(self._error)

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def shutdown(self) -> None:
        """Close the connection, behind the answer that is being written."""
        if not self._requests:
            self.transport.close()
        for request in self._requests:
            request.exchange.keep_alive = False

    # --- time ---------------------------------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """Close a connection that is idle or slow for too long. now: monotonic seconds."""
        age = now - self._began
        if self._ignores:
            limit = _LAST_BYTES_S if self.transport.get_write_buffer_size() else _LINGER_S
            if not self._requests and age > limit:
                self.transport.abort()
        elif self._is_paused:
            return
        elif self._phase is _Phase.BODY:
            if age > _BODY_GRACE_S and self._body_bytes < (age - _BODY_GRACE_S) * _MIN_BODY_RATE:
                self._refuse(HttpError(408, f"the body came at less than {_MIN_BODY_RATE} bytes/s"))
        elif self._requests:
            return
        elif self._phase is _Phase.HEAD:
            if age > _HEAD_S:
                self._refuse(HttpError(408, f"the request's head was not complete within {_HEAD_S:g} s"))
        elif age > IDLE_S:
            self._ignores = True
            self.transport.close()

    # --- parts --------------------------------------------------------------------------------------------------

    def _read_head(self) -> Request:
        """Return the request of a complete head. Errors: HttpError 400, and those of the target."""
        parser = self._parser
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise self._broken(400, f"HTTP/{version} is not spoken here: use HTTP/1.1")
        if version == "1.1" and not self._num_hosts:
            raise self._broken(400, "an HTTP/1.1 request has a Host header")  # RFC 9112, 3.2
        path, query = self._url, b""
        if not path.startswith(b"/") or b"#" in path:
            target = httptools.parse_url(path)
            path, query = target.path or b"/", target.query or b""
        elif b"?" in path:
            path, _, query = path.partition(b"?")
        method = parser.get_method().decode("ascii")
        exchange = Exchange(
            self,
            is_head=method == "HEAD",
            is_http_1_0=version == "1.0",
            keep_alive=parser.should_keep_alive() and not parser.should_upgrade(),
        )
        text = path.decode("ascii")
        text = unquote(text) if "%" in text else text
        return Request(method, text, path, query, self._fields, exchange, num_hosts=self._num_hosts)

    def _begin(self, request: Request) -> None:
        """Begin with a request whose turn has come: ask for its body, or answer it."""
        if request.refusal is not None or request.exchange.is_received:
            self._app.answer(request)
        elif _waits_to_send(request):
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _count_read(self, num_bytes: int) -> None:
        """Count bytes of a request; refuse one whose head is too long, or what surrounds the parts of its body."""
        self._read_bytes += num_bytes
        if self._phase is _Phase.HEAD and self._read_bytes > MAX_HEAD_BYTES:
            self._refuse(HttpError(431, f"the request's head is longer than {MAX_HEAD_BYTES} bytes"))
        elif self._phase is _Phase.BODY and self._read_bytes > MAX_HEAD_BYTES + _MAX_SHARE * self._body_bytes:
            self._refuse(HttpError(431, "the body's chunks have too long extensions, or too long a trailer"))

    def _end_after_this(self) -> None:
        self._ignores = True
        if self._requests:
            self._requests[-1].exchange.keep_alive = False

    def _broken(self, status: int, message: str) -> HttpError:
        """Return the error of a broken bound, to be raised in a callback of the parser, which raises one of its own."""
        self._error = HttpError(status, message)
        return self._error

    def _refuse(self, error: HttpError) -> None:
        """Take nothing more; write an error behind the answers to earlier requests, and close."""
        self._ignores, self._error = True, error
        if self._reading is not None and self._reading in self._requests:
            self._requests.remove(self._reading)
        if not self._requests:
            self._write_error(error)

    def _write_error(self, error: HttpError) -> None:
        self._began = time.monotonic()
        if not self.transport.is_closing():
            body = error.body()
            fields = [(b"content-type", JSON), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
            self.transport.write(self.heads.head(error.status, fields, b"") + body)
            self._close_softly()

    def _close_softly(self) -> None:
        """Close the sending side, and the rest soon: a reset would take from the peer what it has not read."""
        if self.transport.is_closing():
            return
        if self._phase is _Phase.IDLE and self._error is None:
            self.transport.close()
        else:
            self.transport.write_eof()


def _waits_to_send(request: Request) -> bool:
    """Return whether the peer asks before it sends the body (RFC 9110, 10.1.1)."""
    return request.headers.get(b"expect", b"").lower() == b"100-continue"


def sweep(connections: Iterable[HttpProtocol]) -> None:
    """Sweep all connections of a server."""
    now = time.monotonic()
    for connection in list(connections):
        connection.sweep(now)
