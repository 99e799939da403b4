"""Intake: requests that wait to be handled, a few in each turn of the event loop.

A thousand requests may arrive at once, and each costs some tenths of a millisecond. Between two turns the loop answers
whoever asks for /health, and feeds the streams.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")
_EACH_TURN = 16


class Intake(Generic[_T]):
    """A queue that calls `handle` for each entry, at most _EACH_TURN in a turn. Made in the event loop."""

    def __init__(self, handle: Callable[[_T], None]) -> None:
        self._handle = handle
        self._waiting: deque[_T] = deque()
        self._is_scheduled = False
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, entry: _T) -> None:
        """Add an entry."""
        self._waiting.append(entry)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled = False
        for _ in range(min(_EACH_TURN, len(self._waiting))):
            self._handle(self._waiting.popleft())
        if self._waiting:
            self._schedule()
