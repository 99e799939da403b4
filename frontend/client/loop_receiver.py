"""LoopReceiver: an event loop receives a client's frames itself.

Without it a thread receives and wakes the loop: one more thread to wake in each step, and the interpreter's lock is
handed from one to the other.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Protocol

from frontend.client.transport_interface import Borrower


class Lender(Protocol):
    """A client, or its transport."""

    def lend(self, borrower: Borrower | None) -> None:
        """Let this borrower receive, until lend(None)."""

    def receive(self) -> bool:
        """Receive; return whether there is more."""


class LoopReceiver:
    """The borrower of a client's socket. Made and closed in the loop's thread; before and after, the client's own
    thread receives.
    """

    def __init__(self, client: Lender, loop: asyncio.AbstractEventLoop) -> None:
        self._client, self._loop = client, loop
        self._thread = threading.get_ident()
        self._fd = -1
        self._is_collecting = False
        self._is_closed = False
        self._is_paused = False
        self._is_due = False  # to receive, once it is not paused any more
        self._rest: asyncio.TimerHandle | None = None
        client.lend(self)

    def close(self) -> None:
        """Give the socket back."""
        self._is_closed = True
        if self._rest is not None:
            self._rest.cancel()
        self._client.lend(None)
        self._unwatch()

    def pause(self) -> None:
        """Receive nothing until resume().

        What comes until then waits in the socket and, when that is full, at the engine, which merges it.
        """
        self._is_paused = True

    def rest(self, seconds: float) -> None:
        """Receive nothing for this time, even if resume() is called."""
        if self._rest is None and not self._is_closed:
            self._is_paused = True
            if self._fd >= 0:  # a frame that waits would wake the loop in each of its turns
                self._loop.remove_reader(self._fd)
            self._rest = self._loop.call_later(seconds, self._end_rest)

    def _end_rest(self) -> None:
        self._rest = None
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._receive)
        self._is_due = True
        self.resume()

    def resume(self) -> None:
        """Receive again. Does nothing if it was not paused."""
        if self._rest is not None:
            return
        self._is_paused = False
        if self._is_due:
            self._is_due = False
            self._loop.call_soon(self._receive)

    def watch(self, fd: int) -> None:
        """Wait on this file descriptor; see Borrower."""
        try:
            self._loop.call_soon_threadsafe(self._watch, fd)
        except RuntimeError:  # the loop is closed
            os.close(fd)

    def look(self) -> None:
        """Receive soon; see Borrower."""
        call = self._loop.call_soon if threading.get_ident() == self._thread else self._loop.call_soon_threadsafe
        try:
            call(self._receive)
        except RuntimeError:  # the loop is closed
            return

    def collect(self, flush: Callable[[], None]) -> bool:
        """Return whether a frame may wait for the end of this turn of the loop; see Borrower."""
        if self._is_closed or threading.get_ident() != self._thread or not self._loop.is_running():
            return False
        if self._is_collecting:
            return True
        self._is_collecting = True
        self._loop.call_soon(self._flush, flush)
        return False

    def _flush(self, flush: Callable[[], None]) -> None:
        self._is_collecting = False
        flush()

    def _watch(self, fd: int) -> None:
        self._unwatch()
        if self._is_closed:
            os.close(fd)
            return
        self._fd = fd
        self._loop.add_reader(fd, self._receive)
        self._receive()

    def _unwatch(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _receive(self) -> None:
        if self._is_paused:
            self._is_due = True
        elif not self._is_closed and self._client.receive():
            self._loop.call_soon(self._receive)
