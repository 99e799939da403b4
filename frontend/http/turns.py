"""Turns: work that would block the event loop, on threads, in turns between tenants.

A tenant that sends a lot waits only for its own work. The bytes processed at the same time are bounded, because
tokenizing takes up to 350 bytes of memory for each byte of text; so are those that wait.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from frontend.http.errors import HttpError, retry_after
from frontend.http.freed_memory import FreedMemory

#: Most bytes of concurrent work. A single piece of work may be larger, and then runs alone.
_MAX_RUNNING = 512 << 10
#: Most bytes of requests that wait here: of all, and of one tenant.
_MAX_WAITING, _MAX_OF_TENANT = 64 << 20, 32 << 20

#: Bytes of work after which freed memory is looked for at once.
_LARGE = 256 << 10

_T = TypeVar("_T")


class _Waiting(NamedTuple):
    size: int
    turn: "asyncio.Future[None]"


class Turns:
    """Threads for work of one event loop. num_threads: pieces of work that run at the same time."""

    def __init__(self, num_threads: int) -> None:
        self.freed = FreedMemory()
        self._num_threads = num_threads
        self._num_running = self._size_running = self._size_waiting = 0
        self._waiting: dict[str, deque[_Waiting]] = {}  # by tenant, in the order of their turns

    async def run(self, tenant: str, size: int, work: Callable[[], _T]) -> _T:
        """Return the result of `work`, run on a thread. size: bytes of its input. Errors: HttpError 503; work's own."""
        if self._waiting or not self._fits(size):
            await self._wait(tenant, size)
        else:
            self._begin(size)
        try:
            return await asyncio.to_thread(self._run, work, size)
        finally:
            self._num_running -= 1
            self._size_running -= size
            self._start_next()

    async def _wait(self, tenant: str, size: int) -> None:
        mine = self._waiting.get(tenant, deque())
        held = sum(one.size for one in mine)
        if mine and (self._size_waiting + size > _MAX_WAITING or held + size > _MAX_OF_TENANT):
            raise HttpError(503, "the server has too much text to read", headers=retry_after(1000))
        entry = _Waiting(size, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, mine).append(entry)
        self._size_waiting += size
        try:
            await entry.turn  # set by _start_next(), which has begun the work
        except asyncio.CancelledError:
            if entry.turn.done() and not entry.turn.cancelled():
                self._num_running -= 1
                self._size_running -= size
                self._start_next()
            raise

    def _start_next(self) -> None:
        """Begin the work of the next tenant while there is room; its next work comes after the others'."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            entry = self._waiting[tenant][0]
            if not entry.turn.cancelled() and not self._fits(entry.size):
                return
            mine = self._waiting.pop(tenant)
            mine.popleft()
            self._size_waiting -= entry.size
            if mine:
                self._waiting[tenant] = mine
            if not entry.turn.cancelled():
                self._begin(entry.size)
                entry.turn.set_result(None)

    def _fits(self, size: int) -> bool:
        if self._num_running >= self._num_threads:
            return False
        return not self._num_running or self._size_running + size <= _MAX_RUNNING

    def _begin(self, size: int) -> None:
        self._num_running += 1
        self._size_running += size

    def _run(self, work: Callable[[], _T], size: int) -> _T:
        try:
            return work()
        finally:
            if size > _LARGE:
                self.freed.give_back()
