"""HttpProtocol: uvicorn's HTTP/1.1 connection, with bounds on what a peer may send and how slowly.

uvicorn reads headers and bodies, keeps connections, and writes answers; the application behind it is ASGI. This adds
the bounds that uvicorn lacks. Data beyond a bound gets its error at once, before it is read, and the connection is
closed. Timeouts are checked by one sweep each second over all connections, so a connection needs no timer. While a
later request of a connection waits, nothing is read.
"""

import time
from collections.abc import Iterable
from enum import Enum
from typing import Any

import httptools
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from frontend.http.errors import HttpError
from frontend.http.wire.exchange import Exchange
from frontend.http.wire.held_bodies import HeldBodies, HeldBody
from frontend.http.wire.soft_transport import SoftTransport

UPLOADS = b"/v1/files"
MAX_HEAD_BYTES = 65_536
MAX_FIELDS = 100
_MAX_SHARE = 16  # bytes that may arrive for each byte of a body, without headers: a chunk of one byte has 6
MAX_PIPELINED = 32  # requests of one connection that wait for earlier answers
_HEAD_S = 10.0  # from the first byte of the headers to the last
IDLE_S = 75  # of a connection without a request: longer than clients keep one in their pools
_BODY_GRACE_S = 10.0  # from the headers
_MIN_BODY_RATE = 1024  # bytes/s, after the grace
_MAX_SILENT_S = 15.0  # of a body, however much of it came before
_DROPPED_AT_ONCE = 128 << 10  # bytes of a body that no request wants
_LINGER_S = 2.0  # from the last byte of an answer to the end of a connection that takes no more requests
_LAST_BYTES_S = 60.0  # for a peer to read that last byte


class Bounds(msgspec.Struct, frozen=True):
    """Bounds that the operator of the server chooses."""

    max_body_bytes: int
    max_connections: int
    max_file_bytes: int = 0  # of a body that is sent to UPLOADS, which is not kept in memory; 0 = as of every body


class _Phase(Enum):
    IDLE = 0  # between requests
    HEAD = 1
    BODY = 2


class _Flow(FlowControl):
    """Flow of one connection.

    It reads nothing while a later request waits, the peer does not read, or what comes is to be dropped in turn.
    """

    def __init__(self, protocol: "HttpProtocol", transport: Any) -> None:
        super().__init__(transport)
        self._pipeline = protocol.pipeline
        self.awaits_turn = False  # to drop a part of a body

    def resume_reading(self) -> None:
        """Read again, unless there is another reason not to."""
        if self.read_paused and not (self._pipeline or self.write_paused or self.awaits_turn):
            super().resume_reading()


class HttpProtocol(HttpToolsProtocol):
    """See the module's docstring. A request's scope has its Wire and its HeldBody in `state`."""

    is_chunked = True

    def __init__(self, config: Config, state: ServerState, bounds: Bounds, bodies: HeldBodies) -> None:
        super().__init__(config, state, {})
        self.is_full = False  # written data waits for the peer to read
        self._full_since = 0.0  # monotonic seconds
        self.exchange: Exchange | None = None  # of the request that is being answered
        self._bounds, self._bodies = bounds, bodies
        self._phase = _Phase.IDLE
        self._began = self._deadline = time.monotonic()  # of the wait, the headers or the body being read
        self._running: RequestResponseCycle | None = None  # the request that is being answered, or was last
        self._held: HeldBody | None = None  # the body that is being read
        self._num_fields = self._num_hosts = self._head_bytes = self._body_bytes = self._read_bytes = 0
        self._most = 0  # bytes of the body that is being read
        self._dropped_bytes = 0  # since this connection's last turn
        self._num_open = 0  # requests without a complete answer
        self._error: HttpError | None = None  # of the refusal that closes the connection
        self._is_deaf = False  # further data is ignored: a refusal was written, or the last request is complete

    # --- the peer sends -----------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Count the connection; refuse it above the bound."""
        self._soft = SoftTransport(transport, self._on_close)
        super().connection_made(self._soft)  # type: ignore[arg-type]
        self.flow: _Flow = _Flow(self, transport)
        if len(self.connections) > self._bounds.max_connections:
            self._refuse(HttpError(503, f"the server has {self._bounds.max_connections} connections, its limit"))
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Parse what came, up to the first bound that it breaks."""
        self._parse(data)
        if self._is_deaf or (self._phase is _Phase.BODY and self.cycle.response_complete):
            self._dropped_bytes += len(data)
            if self._dropped_bytes >= _DROPPED_AT_ONCE:
                self._read_in_turn()

    def _parse(self, data: bytes) -> None:
        while data and not self._is_deaf:
            phase, began = self._phase, self._began
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:  # answered as if it had not been made (RFC 9110, 7.8)
                data = self._head_without_offer() + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                continue
            except httptools.HttpParserError:
                if not self._is_deaf:
                    self._refuse(self._error or HttpError(400, "this is not a valid HTTP/1.1 request"))
                return
            if (
                self._phase is phase and self._began == began and not self._is_deaf
            ):  # all of it is of one request's headers or body
                self._count_read(len(data))
            if self._phase is _Phase.HEAD and not self._is_deaf:
                self._hold_head(len(data))
            return

    def on_message_begin(self) -> None:
        """Begin the headers of a request."""
        super().on_message_begin()
        if self._held is not None and self._phase is _Phase.HEAD:
            self._held.release()  # of headers with an offer, which are read once more
        self._phase, self._began = _Phase.HEAD, time.monotonic()
        self._held = HeldBody(self._bodies, self._refuse)
        self._num_fields = self._num_hosts = self._head_bytes = self._body_bytes = self._read_bytes = 0

    def on_url(self, url: bytes) -> None:
        """Take a part of the target."""
        super().on_url(url)
        if len(self.url) > MAX_HEAD_BYTES:
            raise self._broken(431, f"the request's headers are longer than {MAX_HEAD_BYTES} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a field, up to MAX_FIELDS; those after a body are only counted."""
        self._num_fields += 1
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise self._broken(431, f"the request's headers are longer than {MAX_HEAD_BYTES} bytes")
        if self._num_fields > MAX_FIELDS:
            raise self._broken(431, f"the request has more than {MAX_FIELDS} header fields")
        if self._phase is not _Phase.HEAD:
            return
        name = name.lower()  # in the place of uvicorn's on_header(), as one call: requests have many fields
        self.headers.append((name, value))
        if name == b"host":
            self._num_hosts += 1
        elif name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True

    def on_headers_complete(self) -> None:
        """Check the headers; errors are answered without reading the body."""
        version = self.parser.get_http_version()
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise self._broken(400, "CONNECT is for proxies; this server is not one")
            return  # the headers are read once more, without the offer
        if version not in ("1.1", "1.0"):
            raise self._broken(400, f"HTTP/{version} is not supported here: use HTTP/1.1")
        if version == "1.1" and not self._num_hosts:
            raise self._broken(400, "an HTTP/1.1 request must have a Host header")  # RFC 9112, 3.2
        length = next((int(value) for name, value in self.headers if name == b"content-length"), 0)  # parsed already
        self._most = self._most_bytes()
        if length > self._most:
            raise self._broken(413, f"the body has {length} bytes; {self._most} are allowed")
        if len(self.pipeline) >= MAX_PIPELINED:
            raise self._broken(400, f"more than {MAX_PIPELINED} requests wait on this connection")
        self._phase, self._began = _Phase.BODY, time.monotonic()
        self._deadline = self._began + _BODY_GRACE_S
        assert self._held is not None, self._phase
        self._held.release()  # its headers are complete; now the body is counted
        self.scope["state"].update(wire=self, body=self._held)
        super().on_headers_complete()
        self._num_open += 1
        self.cycle.keep_alive = self.parser.should_keep_alive()  # of HTTP/1.0 too

    def on_body(self, body: bytes) -> None:
        """Take a part of a body, up to the bound."""
        self._body_bytes += len(body)
        if self._body_bytes > self._most:
            raise self._broken(413, f"the body is longer than {self._most} bytes")
        now = time.monotonic()
        self._deadline = min(self._deadline + len(body) / _MIN_BODY_RATE, now + _MAX_SILENT_S)
        if self.cycle.response_complete or self.cycle.disconnected:
            return
        assert self._held is not None, self._phase
        try:
            self._held.add(len(body))
        except HttpError as error:
            self._error = error
            raise
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request; the next bytes are the headers of another one."""
        if self.parser.should_upgrade():
            return
        assert self._held is not None, self._phase
        self._phase, self._began = _Phase.IDLE, time.monotonic()
        self._held.complete()
        if not self.parser.should_keep_alive():
            self._is_deaf = True
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the answering side, and release all references: a cycle would stay until a full garbage collection."""
        self._is_deaf = True
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:  # behind it others may wait
            self._disconnect(self._running)
        self._drop_waiting()
        if self._held is not None and self._phase is _Phase.HEAD:
            self._held.release()
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.leave()
        self._soft.forget()
        self.cycle = self._running = self.scope = self.headers = self._held = None  # type: ignore[assignment]
        self._error = None  # its traceback has this connection

    # --- the peer reads -----------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """Stop reading from a peer that reads too slowly: further answers would wait here."""
        super().pause_writing()
        self.is_full, self._full_since = True, time.monotonic()
        self.flow.pause_reading()

    def resume_writing(self) -> None:
        """Read again, and send waiting data."""
        super().resume_writing()
        self.is_full = False
        self.flow.resume_reading()
        if self.exchange is not None:
            self.exchange.resume()

    def write_raw(self, data: bytes) -> None:
        """Write bytes after an answer's headers, without a frame."""
        self.transport.write(data)

    def cork(self) -> None:
        """Keep what is written until uncork()."""
        self._soft.cork()

    def uncork(self) -> None:
        """Write what was kept."""
        self._soft.uncork()

    def keep(self, num_bytes: int) -> None:
        """Set how many bytes of an answer wait for the peer to read."""
        self._bodies.unread.keep(self, num_bytes)

    def abort(self) -> None:
        """Close the connection at once and drop waiting data."""
        self.transport.abort()

    def on_response_complete(self) -> None:
        """Go on behind a complete answer: with the next request, or with the end of the connection.

        In the place of uvicorn's, which sets a timer for each answer: sweep() ends what is idle.
        """
        self._num_open -= 1
        self._began, self.exchange = time.monotonic(), None
        self.server_state.total_requests += 1
        if self._phase is _Phase.BODY and self.flow.read_paused and self.cycle.response_complete:
            self._read_in_turn()
        if not self.transport.is_closing():
            self.flow.resume_reading()
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())
        if self._error is not None and not self._num_open:
            self._write_error(self._error)

    def _on_close(self) -> bool:
        """Accept nothing more; return whether the peer may still send."""
        self._is_deaf, self._began = True, time.monotonic()
        return self._phase is not _Phase.IDLE or self._error is not None

    def _read_in_turn(self) -> None:
        """Read no more of a body that no request wants until it is this connection's turn."""
        self._dropped_bytes = 0
        if not self.flow.awaits_turn:
            self.flow.pause_reading()
            self.flow.awaits_turn = True
            self._bodies.drops.put(self._read_on, self.loop)

    def _read_on(self) -> None:
        self.flow.awaits_turn = False
        if self.parser is not None:  # the connection was not lost
            self.flow.resume_reading()

    # --- time ---------------------------------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """Close a connection that is idle or slow for too long. now: monotonic seconds."""
        age = now - self._began
        if self._is_deaf:
            limit = _LAST_BYTES_S if self.transport.get_write_buffer_size() else _LINGER_S
            if not self._num_open and age > limit:
                self.transport.abort()
        elif self.is_full and self.exchange is not None and self.exchange.is_complete:
            if now - self._full_since > IDLE_S:
                self.transport.abort()  # its peer does not read the rest of an answer
        elif self.flow.read_paused:
            self._deadline = max(self._deadline, now + _BODY_GRACE_S)  # the delay was not the peer's
        elif self._phase is _Phase.BODY:
            if now > self._deadline:
                self._refuse(HttpError(408, f"the body arrived at less than {_MIN_BODY_RATE} bytes/s"))
        elif self._num_open:
            return
        elif self._phase is _Phase.HEAD:
            if age > _HEAD_S:
                self._refuse(HttpError(408, f"the request's headers were not complete within {_HEAD_S:g} s"))
        elif age > IDLE_S:
            self._is_deaf = True
            self.transport.close()

    # --- parts --------------------------------------------------------------------------------------------------

    def _most_bytes(self) -> int:
        """Return the bound of the body whose headers are complete."""
        bounds = self._bounds
        is_upload = self.parser.get_method() == b"POST" and self.url.partition(b"?")[0].endswith(UPLOADS)
        return max(bounds.max_body_bytes, bounds.max_file_bytes if is_upload else 0)

    def _should_upgrade(self) -> bool:
        return False

    def _head_without_offer(self) -> bytes:
        """Return the headers that were read, without the Upgrade field."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        fields = [b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade"]
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(fields))

    def _count_read(self, num_bytes: int) -> None:
        """Count bytes of a request; refuse one with too long headers, or with too much overhead around its chunks."""
        self._read_bytes += num_bytes
        if self._phase is _Phase.HEAD and self._read_bytes > MAX_HEAD_BYTES:
            self._refuse(HttpError(431, f"the request's headers are longer than {MAX_HEAD_BYTES} bytes"))
        elif self._phase is _Phase.BODY and self._read_bytes > MAX_HEAD_BYTES + _MAX_SHARE * self._body_bytes:
            self._refuse(HttpError(431, "the body's chunk extensions or trailers are too long"))

    def _hold_head(self, num_bytes: int) -> None:
        """Count the stored bytes of incomplete headers."""
        assert self._held is not None, self._phase
        try:
            self._held.add(num_bytes)
        except HttpError as error:
            self._refuse(error)

    def _broken(self, status: int, message: str) -> HttpError:
        """Return the error of an exceeded bound, to be raised in a callback of the parser, which raises its own."""
        self._error = HttpError(status, message)
        return self._error

    def _refuse(self, error: HttpError) -> None:
        """Accept nothing more; write an error after the answers to earlier requests, and close.

        A request that was answered before its body was complete gets no second answer.
        """
        self._is_deaf, self._error = True, error
        if self._phase is _Phase.HEAD and self._held is not None:
            self._held.release()
        elif self._phase is _Phase.BODY:
            cycle: RequestResponseCycle = self.cycle
            if cycle.response_started:
                self._error, cycle.keep_alive = None, False
                if cycle.response_complete:
                    self.transport.close()
                return
            self._num_open -= 1
            self._disconnect(cycle)
            if self.pipeline and self.pipeline[0][0] is cycle:
                self.pipeline.popleft()
                cycle.scope["state"]["body"].release()
            elif self.exchange is not None:
                self.exchange.leave()
        if not self._num_open:
            self._write_error(error)

    def _write_error(self, error: HttpError) -> None:
        self._began = time.monotonic()
        if self.transport.is_closing():
            return
        body = error.body()
        fields = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *error.headers]
        fields += [] if (b"connection", b"close") in fields else [(b"connection", b"close")]
        lines = [b"%b: %b\r\n" % field for field in (*self.server_state.default_headers, *fields)]
        self.transport.write(b"%b%b\r\n%b" % (STATUS_LINE[error.status], b"".join(lines), body))
        self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _disconnect(self, cycle: RequestResponseCycle) -> None:
        """Notify the reader of a request, or the answering side, that its peer is gone."""
        cycle.disconnected = True
        cycle.message_event.set()

    def _drop_waiting(self) -> None:
        """Drop the requests that wait for earlier answers."""
        for cycle, _ in self.pipeline:
            cycle.scope["state"]["body"].release()
        self.pipeline.clear()


def sweep(connections: Iterable[HttpProtocol]) -> None:
    """Sweep all connections of a server."""
    now = time.monotonic()
    for connection in list(connections):
        connection.sweep(now)
