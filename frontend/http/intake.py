"""Intake: requests that wait to be handled, a few in each turn of the event loop.

A thousand requests may arrive at once, and each costs some tenths of a millisecond. Between two turns the loop answers
/health and feeds the streams.
"""

import asyncio
from collections import deque

_EACH_TURN = 16
_BYTES_EACH_TURN = 64 << 10  # of bodies to decode, which takes up to 10 ms


class Intake:
    """A queue that lets at most _EACH_TURN entries, or _BYTES_EACH_TURN of them, pass in a turn.

    Created in the event loop.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._num_passed = self._bytes_passed = 0  # in this turn of the loop
        self._is_scheduled = False
        self._loop = asyncio.get_running_loop()

    async def turn(self, size: int = 0) -> None:
        """Wait for this caller's turn, if this one is full. size: bytes of its body."""
        self._schedule()
        if self._has_room() and not self._waiting:
            self._note(size)
            return
        turn = self._loop.create_future()
        self._waiting.append((turn, size))
        await turn

    def _has_room(self) -> bool:
        return self._num_passed < _EACH_TURN and self._bytes_passed < _BYTES_EACH_TURN

    def _note(self, size: int) -> None:
        self._num_passed += 1
        self._bytes_passed += size

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._let_pass)

    def _let_pass(self) -> None:
        self._is_scheduled = False
        self._num_passed = self._bytes_passed = 0
        while self._waiting and self._has_room():
            turn, size = self._waiting.popleft()
            if not turn.done():  # a cancelled caller
                turn.set_result(None)
                self._note(size)
        if self._num_passed:
            self._schedule()
