"""A load generator's side of an HTTP connection: requests as bytes; answers are counted, not parsed."""

import asyncio
import time
from typing import Any

import msgspec


def post(path: str, body: dict[str, Any]) -> bytes:
    """Return a request with a JSON body."""
    data = msgspec.json.encode(body)
    return b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        path.encode(),
        len(data),
        data,
    )


def get(path: str) -> bytes:
    """Return a request without a body."""
    return b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % path.encode()


class Peer(asyncio.Protocol):
    """One keep-alive connection. It counts the events of an answer and finds its end."""

    def __init__(self) -> None:
        self.num_events = 0  # over all answers
        self.first_s = 0.0  # from the last request to the first event of its answer, seconds
        self.status = 0
        self._asked = 0.0
        self._answer: asyncio.Future[None] | None = None
        self._head = b""
        self._left = -1  # bytes of a body with a length; -1 = in the headers or in chunks
        self._tail = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: Any) -> None:
        """Keep the transport."""
        self._transport = transport

    def send(self, request: bytes) -> None:
        """Send a request without waiting."""
        assert self._transport is not None, "not connected"
        self._head, self._left, self._tail, self.first_s = b"", -1, b"", 0.0
        self._asked = time.perf_counter()
        self._transport.write(request)

    async def ask(self, request: bytes) -> None:
        """Send a request and wait for the end of its answer. Errors: ConnectionError."""
        self._answer = asyncio.get_running_loop().create_future()
        self.send(request)
        await self._answer

    def data_received(self, data: bytes) -> None:
        """Count events, and look for the end."""
        if not self._tail and self._left < 0:
            data = self._take_head(data)
        if self._left >= 0:
            self._left -= len(data)
            if self._left <= 0:
                self._finish()
            return
        if data:
            count = (self._tail[-5:] + data).count(b"data: ") if self._tail else data.count(b"data: ")
            if count and not self.first_s:
                self.first_s = time.perf_counter() - self._asked
            self.num_events += count
            self._tail = (self._tail + data)[-8:]
            if self._tail.endswith(b"\r\n0\r\n\r\n"):
                self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the waiting call."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("the server closed the connection"))

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def _take_head(self, data: bytes) -> bytes:
        """Return the rest after the headers."""
        self._head += data
        head, end, rest = self._head.partition(b"\r\n\r\n")
        if not end:
            return b""
        self._head, self.status = b"", int(head[9:12])
        self._tail = b"........"  # the headers are complete
        at = head.find(b"content-length: ")
        if at >= 0:
            self._left = int(head[at + 16 :].split(b"\r\n", 1)[0])
        return rest

    def _finish(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)


async def connect(port: int) -> Peer:
    """Return a connection to a server on this machine."""
    _, peer = await asyncio.get_running_loop().create_connection(Peer, "127.0.0.1", port)
    return peer
