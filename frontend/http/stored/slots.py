"""Slots and Place: a bounded number of pieces of work at the same time, in turns between tenants."""

import asyncio
from collections import deque
from collections.abc import Callable


class Slots:
    """Places for work, which tenants get in turns. most: returns how many there are now."""

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self._num_taken = 0
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant, in the order of their turns

    @property
    def is_awaited(self) -> bool:
        """Return whether some work waits for a place."""
        return bool(self._waiting)

    async def take(self, tenant: str) -> None:
        """Wait for a place, and take it."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self.admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give()
            raise

    def give(self) -> None:
        """Give a place back."""
        self._num_taken -= 1
        self.admit()

    def admit(self) -> None:
        """Give out the places that there are now. For the owner, if their number has grown."""
        while self._waiting and self._num_taken < self._most():
            tenant = next(iter(self._waiting))
            mine = self._waiting.pop(tenant)
            turn = mine.popleft()
            if mine:
                self._waiting[tenant] = mine
            if not turn.done():
                self._num_taken += 1
                turn.set_result(None)


class Place:
    """One place of a tenant, which is taken and given back, maybe more than once."""

    def __init__(self, slots: Slots, tenant: str) -> None:
        self._slots, self._tenant, self._is_held = slots, tenant, False

    async def take(self) -> None:
        """Wait for the place."""
        await self._slots.take(self._tenant)
        self._is_held = True

    def give(self) -> None:
        """Give it back, if it is held."""
        if self._is_held:
            self._is_held = False
            self._slots.give()
