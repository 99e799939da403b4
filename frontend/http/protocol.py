"""BoundedProtocol: uvicorn's HTTP/1.1 protocol with bounds on what a peer may send and how slowly.

uvicorn takes a head of any size, waits for the rest of a request for ever, and takes a body of any size. Here, what is
beyond a bound gets its error at once, before it is read, and the connection is closed. Time is judged by one sweep each
second over all connections, so that a connection costs no timer.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from frontend.http.errors import HttpError

MAX_HEAD_BYTES = 65_536
MAX_FIELDS = 100
MAX_PIPELINED = 32  # requests of one connection that wait for the answer before theirs
_HEAD_S = 10.0  # from a head's first byte to its last
IDLE_S = 75.0  # of a connection without a request: longer than clients keep one in their pools
_BODY_GRACE_S = 10.0
_MIN_BODY_RATE = 1024  # bytes/s, after the grace


class Bounds(msgspec.Struct, frozen=True):
    """Bounds that the owner of the server chooses."""

    max_body_bytes: int
    max_connections: int


class BoundedProtocol(HttpToolsProtocol):
    """One connection; it is its requests' Connection too. `bounds` is set once for the process, before the first."""

    bounds = Bounds(max_body_bytes=8 << 20, max_connections=20_000)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.on_writable: Callable[[], None] | None = None
        self._head_bytes = 0  # of the head that is being read
        self._answering: RequestResponseCycle | None = None  # self.cycle is the last of a pipeline
        self._field_bytes = 0  # of target and fields in it
        self._in_head = True
        self._body_bytes = 0
        self._error: HttpError | None = None  # of the refusal that closes the connection
        self._began = time.monotonic()  # of the wait, the head or the body that is being read

    # --- the peer sends -----------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Count the connection; refuse it above the bound."""
        super().connection_made(transport)
        if len(self.connections) > self.bounds.max_connections:
            self._refuse(HttpError(503, f"the server has {self.bounds.max_connections} connections, its limit"))

    def data_received(self, data: bytes) -> None:
        """Parse what came, up to the first bound that it breaks."""
        if self._error is not None:
            return
        if self._in_head:
            if not self._head_bytes:
                self._began = time.monotonic()
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(HttpError(431, f"the request's head is longer than {MAX_HEAD_BYTES} bytes"))

    def on_message_begin(self) -> None:
        """Begin a request; the scope has the connection for the reply."""
        super().on_message_begin()
        self.scope["extensions"] = {"engine_core.connection": self}  # type: ignore[dict-item]
        self._in_head, self._field_bytes = True, 0

    def on_url(self, url: bytes) -> None:
        """Take a part of the target."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a field, up to MAX_FIELDS."""
        self._count_head(len(name) + len(value))
        if len(self.headers) >= MAX_FIELDS:
            raise self._broken(431, f"the request has more than {MAX_FIELDS} header fields")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Judge the declared length of the body; begin the request."""
        self._in_head, self._head_bytes, self._body_bytes = False, 0, 0
        self._began = time.monotonic()
        lengths = [value for name, value in self.headers if name == b"content-length"]
        if lengths and int(lengths[0]) > self.bounds.max_body_bytes:  # the parser has read it as a number
            raise self._broken(413, f"the body has {int(lengths[0])} bytes; {self.bounds.max_body_bytes} are allowed")
        if len(self.pipeline) >= MAX_PIPELINED:
            raise self._broken(400, f"more than {MAX_PIPELINED} requests wait on this connection")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of a body, up to the bound."""
        self._body_bytes += len(body)
        if self._body_bytes > self.bounds.max_body_bytes:
            raise self._broken(413, f"the body is longer than {self.bounds.max_body_bytes} bytes")
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request; the next bytes are another head."""
        self._in_head, self._began = True, time.monotonic()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, or breaks a bound, in the form of all errors; uvicorn's handler calls this."""
        self._refuse(self._error or HttpError(400, "this is not a valid HTTP/1.1 request"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request that is being answered, which uvicorn does for the last of a pipeline only."""
        super().connection_lost(exc)
        self.pipeline.clear()
        if self._answering is not None:
            self._answering.disconnected = True
            self._answering.message_event.set()
        self._wake()

    # --- the peer reads -----------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Return whether uvicorn's send() would wait for the peer."""
        return self.flow.write_paused

    def resume_writing(self) -> None:
        """Tell the reply that waited."""
        super().resume_writing()
        self._wake()

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    # --- time ---------------------------------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """Close a connection that is idle or slow for too long. now: monotonic seconds."""
        if self._error is not None or self.transport.is_closing():
            return
        age = now - self._began
        if self._answering is not None and not self._answering.response_complete and not self._answering.more_body:
            return
        if not self._in_head:
            if age > _BODY_GRACE_S and self._body_bytes < (age - _BODY_GRACE_S) * _MIN_BODY_RATE:
                self._refuse(HttpError(408, f"the body came at less than {_MIN_BODY_RATE} bytes/s"))
        elif self._head_bytes:
            if age > _HEAD_S:
                self._refuse(HttpError(408, f"the request's head was not complete within {_HEAD_S:g} s"))
        elif self.cycle is None and age > IDLE_S:  # after an answer, uvicorn's own timer does this
            self.transport.close()

    def _count_head(self, size: int) -> None:
        self._field_bytes += size
        if self._field_bytes > MAX_HEAD_BYTES:
            raise self._broken(431, f"the request's head is longer than {MAX_HEAD_BYTES} bytes")

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _broken(self, status: int, message: str) -> HttpError:
        """Return the error of a broken bound, to be raised in a callback of the parser, which raises one of its own."""
        self._error = HttpError(status, message)
        return self._error

    def _wake(self) -> None:
        wake, self.on_writable = self.on_writable, None
        if wake is not None:
            wake()

    def _refuse(self, error: HttpError) -> None:
        """Write an error, unless another answer is being written, and close."""
        self._error = error
        if self.transport.is_closing():
            return
        answering = self._answering
        if answering is None or not answering.response_started or answering.response_complete:
            body = error.body()
            fields = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            lines = [b"%b: %b\r\n" % field for field in (*fields, (b"connection", b"close"))]
            self.transport.write(b"".join((STATUS_LINE[error.status], *lines, b"\r\n", body)))
        self.transport.close()


def sweep(connections: Iterable[Any]) -> None:
    """Sweep all connections of a server."""
    now = time.monotonic()
    for connection in list(connections):
        connection.sweep(now)
