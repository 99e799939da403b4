"""Exchange: one request and its answer, on top of the ASGI server's events.

An answer is written whole, or as a stream: begin(), write(), end(). ASGI lets an application wait for a peer that does
not read. Streams have no task that could wait, so the connection says whether it is full (Wire), and anything written
anyway is sent once it is not.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, MutableMapping
from typing import Any, Protocol

from frontend.http.errors import Headers

Message = MutableMapping[str, Any]
Send = Callable[[Message], Coroutine[Any, Any, None]]
Receive = Callable[[], Coroutine[Any, Any, Message]]

#: Bytes of a long part that are written at once: copying and sending 10 MB would take a turn of 20 ms.
PIECE_BYTES = 256 << 10


class Wire(Protocol):
    """The connection's interface for an exchange, in addition to ASGI."""

    exchange: "Exchange | None"  # notified when the peer reads again, or leaves

    is_full: bool  # written data waits for the peer to read, so no more should be written

    is_chunked: bool  # the parts of a stream are framed as chunks (RFC 9112, 7.1)

    def write_raw(self, data: bytes) -> None:
        """Write bytes after an answer's headers, without a frame."""

    def cork(self) -> None:
        """Keep what is written until uncork()."""

    def uncork(self) -> None:
        """Write what was kept, in one piece: each send() wakes the peer."""

    def keep(self, num_bytes: int) -> None:
        """Set how many bytes of the answer wait for the peer to read. All such bytes together have a bound, beyond
        which some connections are aborted.
        """

    def abort(self) -> None:
        """Close the connection at once and drop waiting data."""


class NoWire:
    """A connection within the process, which is never full."""

    is_full = is_chunked = False

    def __init__(self) -> None:
        self.exchange: Exchange | None = None

    def write_raw(self, data: bytes) -> None:
        """Write nothing: callers never use HTTP/1.0."""

    def cork(self) -> None:
        """Keep nothing: what is written goes to the caller at once."""

    def uncork(self) -> None:
        """Write nothing: nothing was kept."""

    def keep(self, num_bytes: int) -> None:
        """Count nothing: nothing waits."""

    def abort(self) -> None:
        """Do nothing: there is no connection."""


class Exchange:
    """See the module's docstring.

    wrap_whole: makes a whole answer the end of a stream that began before its answer was known; None = there is no such
    stream. on_writable: called once when a full connection accepts data again. on_left: called if the peer leaves
    before the answer is complete.
    """

    def __init__(self, scope: Message, send: Send, wire: Wire) -> None:
        self.wrap_whole: Callable[[bytes], bytes] | None = None
        self.on_writable: Callable[[], None] | None = None
        self.on_left: Callable[[], None] | None = None
        self.is_complete = False
        self.has_left = False
        self.is_received = False  # the request's body is complete
        self._scope, self._send, self._wire = scope, send, wire
        self._is_http_1_0 = scope["http_version"] == "1.0"
        self._is_raw = False  # parts are not framed
        self._is_chunked = False  # parts may be framed here
        self._late: deque[Message] = deque()  # messages for a full connection
        self._num_late = 0  # bytes of them, and of those sent since it was full: pieces of an answer share its memory
        self._sent: asyncio.Future[None] | None = None  # done once no message is late
        self._head: Message | None = None  # of a stream, for its first part
        wire.exchange = self

    def write_whole(self, status: int, fields: Headers, body: bytes) -> None:
        """Write a whole answer."""
        if self.wrap_whole is not None:
            self.end(self.wrap_whole(body))
            return
        self._head = self._whole_head(status, fields, len(body))
        self.end(body)

    async def send_whole(self, status: int, fields: Headers, body: bytes) -> None:
        """Write a whole answer, and wait until the connection has all of it or its peer has left."""
        self.write_whole(status, fields, body)
        if self._late:
            self._sent = asyncio.get_running_loop().create_future()
            await self._sent

    def begin(self, fields: Headers) -> None:
        """Begin a stream of status 200, if none has begun. Its head leaves with the first part, which may be empty."""
        if self.wrap_whole is not None:
            return
        if self._is_http_1_0 and self._scope["method"] != "HEAD":
            # The server would frame parts as chunks, which this peer does not support. It writes headers alone in
            # answer to HEAD, so the parts are written after such headers, and the end of the connection is their end.
            self._scope["method"], self._is_raw = "HEAD", True
            fields = [*fields, (b"connection", b"close")]
        self._is_chunked = self._wire.is_chunked and self._scope["method"] != "HEAD"
        self._head = {"type": "http.response.start", "status": 200, "headers": fields}

    def write(self, part: bytes) -> bool:
        """Write a part of a stream; an empty one is ignored. A long one is written in pieces, as the last part.

        Return whether written data waits for the peer to read, so no more should be written.
        """
        wire = self._wire
        if len(part) > PIECE_BYTES:
            self._write_pieces(part, has_more=True)
            return wire.is_full
        if self._head is not None:
            self._push_with_head({"type": "http.response.body", "body": part, "more_body": True} if part else None)
            return wire.is_full
        if not part or self.has_left:
            return False
        if wire.is_full or self._late or not self._is_chunked:
            self._push({"type": "http.response.body", "body": part, "more_body": True})
        else:  # nearly every event takes this path, and the server's send() takes five times as long
            wire.write_raw(b"%x\r\n%b\r\n" % (len(part), part))
        return wire.is_full

    def end(self, part: bytes) -> None:
        """Write the last part. A long one is written in pieces, each when the peer has read those before it."""
        self.is_complete = True
        self._write_pieces(part, has_more=False)

    def _write_pieces(self, part: bytes, *, has_more: bool) -> None:
        for message in _pieces(part, has_more=has_more):
            if self._head is None:
                self._push(message)
            else:
                self._push_with_head(message)

    def leave(self) -> None:
        """Notify the answering side that the peer has left."""
        self.has_left = True
        self._late.clear()
        self._note_sent()
        told, self.on_left, self.on_writable = self.on_left, None, None
        if told is not None and not self.is_complete:
            told()

    def resume(self) -> None:
        """Send the data that waited for the full connection, and notify the waiting reply."""
        while self._late and not self._wire.is_full:
            self._step(self._late.popleft())
        if self._num_late:
            self._note_sent()
        if not self._late:
            wake, self.on_writable = self.on_writable, None
            if wake is not None:
                wake()

    def abort(self) -> None:
        """Close the connection at once and drop waiting data."""
        self._wire.abort()

    def _whole_head(self, status: int, fields: Headers, num_bytes: int) -> Message:
        """Return the headers of a whole answer.

        A peer that asks before it sends a body (RFC 9110, 10.1.1) and is refused must not use the connection again: it
        is unknown whether the body still comes, so its next request could be mistaken for it.
        """
        fields = list(fields)
        if status != 204:
            fields.append((b"content-length", b"%d" % num_bytes))
        if not self.is_received and self._asked(b"expect", b"100-continue"):
            fields.append((b"connection", b"close"))
        elif self._is_http_1_0 and self._asked(b"connection", b"keep-alive"):
            fields.append((b"connection", b"keep-alive"))
        return {"type": "http.response.start", "status": status, "headers": fields}

    def _asked(self, name: bytes, value: bytes) -> bool:
        return any(field[0] == name and field[1].lower() == value for field in self._scope["headers"])

    def _push_with_head(self, part: Message | None) -> None:
        """Send the head and the first part as one."""
        assert self._head is not None, "the head was sent"
        head, self._head = self._head, None
        self._wire.cork()
        self._push(head)
        if part is not None:
            self._push(part)
        self._wire.uncork()

    def _push(self, message: Message) -> None:
        if self.has_left:
            return
        if self._late or self._wire.is_full:
            self._late.append(message)
            self._num_late += len(message.get("body", b""))
            self._wire.keep(self._num_late)
        else:
            self._step(message)

    def _note_sent(self) -> None:
        """Count the bytes that wait, after some were sent or the peer has left."""
        if not self._late:
            self._num_late = 0
            if self._sent is not None and not self._sent.done():
                self._sent.set_result(None)
        self._wire.keep(self._num_late)

    def _step(self, message: Message) -> None:
        """Send a message. The server's send() waits only for full connections, so it ends in its first step."""
        if self._is_raw and message.get("body"):
            self._wire.write_raw(message["body"])
        try:
            self._send(message).send(None)
        except StopIteration:
            return
        raise AssertionError("send() waits although the connection is not full")


def _pieces(part: bytes, *, has_more: bool = False) -> Iterator[Message]:
    """Yield the messages of a part. Those of a long one share its memory. has_more: it is not the last part."""
    view = memoryview(part) if len(part) > PIECE_BYTES else part
    for at in range(0, len(part) or 1, PIECE_BYTES):
        end = at + PIECE_BYTES
        yield {"type": "http.response.body", "body": view[at:end], "more_body": has_more or end < len(part)}
