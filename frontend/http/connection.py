"""Connection: what a reply needs to know of the connection that it is written to."""

from collections.abc import Callable
from typing import Protocol


class Connection(Protocol):
    """The writing side of one connection. on_writable: called once when a full connection takes data again."""

    on_writable: Callable[[], None] | None

    @property
    def is_full(self) -> bool:
        """Return whether what was written waits for the peer to read, so that no more is to be written."""

    def abort(self) -> None:
        """Close the connection at once and drop what waits to be written."""
