"""Intake: requests that wait to be handled, a few in each turn of the event loop.

A thousand requests may arrive at once, and each costs some tenths of a millisecond. Between two turns the loop answers
whoever asks for /health, and feeds the streams.
"""

import asyncio
from collections import deque

_EACH_TURN = 16


class Intake:
    """A queue that lets at most _EACH_TURN entries pass in a turn. Made in the event loop."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_passed = 0  # in this turn of the loop
        self._is_scheduled = False
        self._loop = asyncio.get_running_loop()

    async def turn(self) -> None:
        """Wait for this caller's turn, if this one is full."""
        self._schedule()
        if self._num_passed < _EACH_TURN and not self._waiting:
            self._num_passed += 1
            return
        turn = self._loop.create_future()
        self._waiting.append(turn)
        await turn

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._let_pass)

    def _let_pass(self) -> None:
        self._is_scheduled = False
        self._num_passed = min(_EACH_TURN, len(self._waiting))
        for _ in range(self._num_passed):
            turn = self._waiting.popleft()
            if not turn.done():  # a caller that was cancelled
                turn.set_result(None)
        if self._num_passed:
            self._schedule()
