"""UnreadAnswers: the memory of all answers that wait for their peers to read."""

from typing import Protocol

#: Bytes that wait for all peers together. A single answer may have more.
MAX_UNREAD_BYTES = 64 << 20


class Reader(Protocol):
    """A connection with an answer that waits."""

    def abort(self) -> None:
        """Close the connection at once and drop the answer."""


class UnreadAnswers:
    """See the module's docstring. If it is full, the peer that has read nothing for the longest time is cut off."""

    def __init__(self, most: int = MAX_UNREAD_BYTES) -> None:
        self.num_bytes = 0
        self._most = most
        self._waiting: dict[Reader, int] = {}  # the longest silent one first

    def keep(self, reader: Reader, num_bytes: int) -> None:
        """Set how many bytes wait for a peer: more were written, it has read some, or it has left."""
        self.num_bytes += num_bytes - self._waiting.pop(reader, 0)
        if num_bytes:
            self._waiting[reader] = num_bytes
        while self.num_bytes > self._most and len(self._waiting) > 1:
            silent = next(iter(self._waiting))
            self.num_bytes -= self._waiting.pop(silent)
            silent.abort()
