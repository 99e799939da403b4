"""HeldBodies: the memory of all requests' bodies together, from their first bytes until they are read.

When it is full, room is made for the body that comes: the unfinished one that has been silent for the longest time is
refused. So callers that never finish their bodies take nothing from the others.

Bodies whose requests were refused by their heads take no memory. They are read slowly: see Drops.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from frontend.http.errors import HttpError, retry_after
from frontend.http.wire.unread_answers import UnreadAnswers

#: From one part of an unwanted body to the next one, of any connection. A part has up to 256 KiB, uvloop's buffer.
_DROP_S = 0.005


class Drops:
    """The reading of bodies that no request wants: one part of one connection at a time, in turns, with pauses.

    A connection that is closed with bytes unread is reset, which may take the answer from its peer. And read at once
    the bodies of one caller whose requests are refused would cost more than the requests of all others.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def put(self, read_on: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        """Call read_on() in its turn."""
        self._waiting.append(read_on)
        if len(self._waiting) == 1:
            loop.call_later(_DROP_S, self._turn, loop)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        read_on = self._waiting.popleft()
        if self._waiting:
            loop.call_later(_DROP_S, self._turn, loop)
        read_on()


class HeldBodies:
    """The bodies of one server. most: bytes. drops, unread: of the same server's other data."""

    def __init__(self, most: int) -> None:
        self.drops, self.unread = Drops(), UnreadAnswers()
        self.most = most
        self.num_bytes = 0
        self.unfinished: dict[HeldBody, None] = {}  # the longest silent one first


class HeldBody:
    """The body of one request. refuse: called if its bytes are needed for others."""

    def __init__(self, bodies: HeldBodies, refuse: Callable[[HttpError], None]) -> None:
        self._bodies, self._refuse = bodies, refuse
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count received bytes. Errors: HttpError 503 if there is no room for them."""
        bodies = self._bodies
        bodies.unfinished.pop(self, None)
        while bodies.num_bytes + num_bytes > bodies.most:
            if not bodies.unfinished:
                raise self._error()
            next(iter(bodies.unfinished)).give_way()
        bodies.unfinished[self] = None
        bodies.num_bytes += num_bytes
        self._num_bytes += num_bytes

    def consume(self, num_bytes: int) -> None:
        """Stop counting bytes of a body that is read part by part."""
        num_bytes = min(num_bytes, self._num_bytes)
        self._bodies.num_bytes -= num_bytes
        self._num_bytes -= num_bytes

    def complete(self) -> None:
        """Keep counting the body, but do not refuse it for others."""
        self._bodies.unfinished.pop(self, None)

    def release(self) -> None:
        """Stop counting the body. Only the first call counts."""
        self._bodies.unfinished.pop(self, None)
        self._bodies.num_bytes -= self._num_bytes
        self._num_bytes = 0

    def give_way(self) -> None:
        """Refuse this unfinished body."""
        self.release()
        self._refuse(self._error())

    def _error(self) -> HttpError:
        text = f"the bodies of all requests together have {self._bodies.most} bytes, the server's limit"
        return HttpError(503, text, headers=retry_after(1000))
