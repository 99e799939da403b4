"""Holders: counts the living objects that hold each key. An object lets go of its key when it is garbage-collected."""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

_Key = TypeVar("_Key")


class Holders(Generic[_Key]):
    """Counts of the living objects that hold each key. Call its methods under the owner's lock.

    on_unheld: called under that lock with a key whose last holder is gone.
    """

    def __init__(self, lock: threading.Lock, on_unheld: Callable[[_Key], None]) -> None:
        self._lock, self._on_unheld = lock, on_unheld
        self._counts: dict[_Key, int] = {}  # number of objects: living ones, and those in _gone
        self._gone: deque[_Key] = deque()  # keys of objects that are gone; appended to without the lock

    def __contains__(self, key: _Key) -> bool:
        return key in self._counts

    def hold(self, holder: object, key: _Key) -> None:
        """Hold the key for as long as this object lives."""
        self._counts[key] = self._counts.get(key, 0) + 1
        weakref.finalize(holder, self._let_go, key).atexit = False

    def _let_go(self, key: _Key) -> None:
        """Record that a holder is gone. The garbage collector may run this in a thread that already has the lock."""
        self._gone.append(key)
        if self._lock.acquire(blocking=False):
            try:
                self.settle()
            finally:
                self._lock.release()

    def settle(self) -> None:
        """Process the recorded ends."""
        while self._gone:
            key = self._gone.popleft()
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]
                self._on_unheld(key)
