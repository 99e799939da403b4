"""Exchange: one request on a connection and the bytes of its answer, framed as its peer understands them.

An answer is written whole, or as a stream: begin(), write(), end(). A stream to an HTTP/1.1 peer is chunked; to an
HTTP/1.0 peer it ends with the connection. A stream's head is sent with its first part.
"""

from collections.abc import Callable
from typing import Protocol

from frontend.http.errors import Headers
from frontend.http.wire.head import Heads

#: First lines of chunks, by their size: most events of a stream are so short.
_SIZES = tuple(b"%x\r\n" % size for size in range(1024))


class Wire(Protocol):
    """What an exchange asks of its connection."""

    heads: Heads

    @property
    def is_full(self) -> bool:
        """Return whether what was written waits for the peer to read, so that no more is to be written."""

    def send(self, data: bytes) -> None:
        """Write bytes."""

    def complete(self, exchange: "Exchange") -> None:
        """Go on behind a complete answer."""

    def abort(self) -> None:
        """Close the connection at once and drop what waits to be written."""


class Exchange:
    """See the module's docstring.

    on_writable: called once when a full connection takes data again. on_left: called if the peer leaves before the
    answer is complete. keep_alive: whether the connection takes another request behind this one.
    """

    def __init__(self, wire: Wire, *, is_head: bool, is_http_1_0: bool, keep_alive: bool) -> None:
        self.on_writable: Callable[[], None] | None = None
        self.on_left: Callable[[], None] | None = None
        self.keep_alive = keep_alive
        self.is_started = False  # bytes of the answer were sent
        self.is_complete = False
        self.has_left = False
        self.is_received = False  # the request's body is complete
        self._wire = wire
        self._is_head = is_head
        self._is_http_1_0 = is_http_1_0
        self._is_raw = is_head or is_http_1_0  # parts are not chunks
        self._unsent_head = b""

    def write_whole(self, status: int, fields: Headers, body: bytes) -> None:
        """Write a whole answer."""
        if self.has_left:
            return
        framing = b"content-length: %d\r\n" % len(body) if status != 204 else b""
        head = self._wire.heads.head(status, fields, framing + self._connection_field())
        self.is_started = True
        self._wire.send(head if self._is_head else head + body)
        self._complete()

    def begin(self, fields: Headers) -> None:
        """Begin a stream of status 200."""
        if self._is_http_1_0:
            self.keep_alive = False  # its end is the end of the connection
            framing = self._connection_field()
        else:
            framing = b"transfer-encoding: chunked\r\n" + self._connection_field()
        self._unsent_head = self._wire.heads.head(200, fields, framing)

    def write(self, part: bytes) -> bool:
        """Write a part of a stream; an empty one is nothing.

        Return whether what was written waits for the peer to read, so that no more is to be written.
        """
        if self.has_left:
            return False
        if self._unsent_head:
            self.is_started = True
            head, self._unsent_head = self._unsent_head, b""
            self._wire.send(head + self._framed(part))
        elif part:
            self._wire.send(self._framed(part))
        return self._wire.is_full

    def end(self, part: bytes) -> None:
        """Write the last part of a stream."""
        if self.has_left:
            return
        self.is_started = True
        last = b"" if self._is_http_1_0 or self._is_head else b"0\r\n\r\n"
        self._wire.send(self._unsent_head + self._framed(part) + last)
        self._complete()

    def leave(self) -> None:
        """Tell whoever answers that the peer has left."""
        self.has_left = True
        told, self.on_left, self.on_writable = self.on_left, None, None
        if told is not None and not self.is_complete:
            told()

    def abort(self) -> None:
        """Close the connection at once and drop what waits to be written."""
        self._wire.abort()

    def _framed(self, part: bytes) -> bytes:
        if self._is_raw or not part:
            return b"" if self._is_head else part
        size = len(part)
        return (_SIZES[size] if size < len(_SIZES) else b"%x\r\n" % size) + part + b"\r\n"

    def _connection_field(self) -> bytes:
        if not self.keep_alive:
            return b"connection: close\r\n"
        return b"connection: keep-alive\r\n" if self._is_http_1_0 else b""

    def _complete(self) -> None:
        self.is_complete = True
        self._wire.complete(self)
