"""HeldBodies: the memory of all requests' bodies together, from their first bytes until they are read.

When it is full, the unfinished body that has been silent for the longest time is refused to make room for a new one. So
callers that never finish their bodies take nothing from the others.
"""

import ctypes
from collections.abc import Callable

from frontend.http.errors import HttpError, retry_after

_WORTH_BYTES = 32 << 20  # it takes a few milliseconds
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc


class HeldBodies:
    """The bodies of one server. most: bytes."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_bytes = 0
        self.unfinished: dict[HeldBody, None] = {}  # the longest silent one first
        self.most_held = 0  # bytes, since the last give_back() that returned some

    def give_back(self) -> None:
        """Let the C library return freed memory to the system, which it would keep otherwise; called regularly."""
        if self.most_held - self.num_bytes >= _WORTH_BYTES and _trim is not None:
            self.most_held = self.num_bytes
            _trim(0)


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
        bodies.most_held = max(bodies.most_held, bodies.num_bytes)
        self._num_bytes += num_bytes

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
