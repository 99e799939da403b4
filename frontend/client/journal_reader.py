"""JournalReader: what consumers read of a client's requests, under the lock of the journal."""

import threading
from collections.abc import Callable
from typing import Protocol

from frontend.client.journal import Journal
from frontend.client.news import News
from frontend.client.progress import Progress
from ipc.tables.arrays import Ints


class JournalReader(Protocol):
    """The reading methods of EngineClient, which owns the fields."""

    _changed: threading.Condition
    _journal: Journal
    _clock: Callable[[], float]

    def raise_if_ended(self) -> None:
        """Raise the error that ended the session, if any."""

    def _check_process(self) -> None:
        """Raise in a forked child."""

    def wait(self, numbers: Ints, timeout: float | None = None) -> Ints:
        """Return those of `numbers` (int64) with news, and wait until there is one; empty after `timeout` seconds.

        Errors: EngineDeadError when the session has ended and none of them has news left.
        """
        self._check_process()
        end = None if timeout is None else self._clock() + timeout
        with self._changed:
            while not len(ready := self._journal.take_ready(numbers)):
                self.raise_if_ended()
                left = None if end is None else end - self._clock()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            return ready

    def take_ready(self) -> Ints:
        """Return the numbers of all requests with news that was not taken yet, for listeners."""
        with self._changed:
            return self._journal.take_ready()

    def take_news(self) -> News:
        """Return all new tokens and ends as columns, except of requests on hold.

        For a listener that serves many requests; it and take_ready() exclude each other.
        """
        with self._changed:
            return self._journal.take_news()

    def hold(self, number: int, held: bool) -> int:
        """Keep a live request's news in the journal, or no longer; return how many of its tokens were not taken."""
        with self._changed:
            return self._journal.hold(number, held)

    def read(self, number: int, start: int = 0, choice: int = 0) -> Progress:
        """Return the progress of a choice of a request, with its tokens from output position `start` on."""
        with self._changed:
            return self._journal.read(number, start, choice)
