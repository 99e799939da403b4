"""Turns: a queue from which one thread takes items of each owner in turn, skipping owners over their share."""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item")

#: Seconds of work that an owner may have at once before its share counts.
BURST_S = 0.05
_MAX_RESTING = 4096  # number of owners above which those that are no longer skipped are forgotten


class Turns(Generic[Item]):
    """Items by owner. An owner's items keep their order. An owner with many items does not delay another one.

    share: the fraction of the time that an owner may use for charged work, above 0; 1.0 = all.
    """

    def __init__(self, share: float = 1.0) -> None:
        self._share = share
        self._items: OrderedDict[Hashable, deque[Item]] = OrderedDict()  # the next owner comes first
        self._paid_at: dict[Hashable, float] = {}  # monotonic: when an owner's share will have paid for its work
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, owner: Hashable, item: Item) -> None:
        """Add an owner's item."""
        with self._changed:
            self._items.setdefault(owner, deque()).append(item)
            self._changed.notify()

    def give_back(self, owner: Hashable, item: Item) -> None:
        """Put back an item that was taken, before the owner's others. Other owners go first."""
        with self._changed:
            self._items.setdefault(owner, deque()).appendleft(item)
            self._items.move_to_end(owner)
            self._changed.notify()

    def charge(self, owner: Hashable, seconds: float) -> None:
        """Charge an owner for work. Its items are skipped while it has used more than its share and BURST_S."""
        now = time.monotonic()
        with self._changed:
            if len(self._paid_at) >= _MAX_RESTING:
                self._paid_at = {one: at for one, at in self._paid_at.items() if at > now}
            self._paid_at[owner] = max(now, self._paid_at.get(owner, now)) + seconds / self._share

    def close(self) -> None:
        """Make take() return None from now on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def take(self) -> Item | None:
        """Wait for an item of an owner that is not skipped and take it; None after close()."""
        with self._changed:
            while not self._is_closed:
                owner, wait_s = self._next(time.monotonic())
                if wait_s == 0.0:
                    return self._take_of(owner)
                self._changed.wait(wait_s)
            return None

    def _next(self, now: float) -> tuple[Hashable, float | None]:
        """Return the first owner that may go, and 0.0; otherwise any, and the seconds until one may; None = no item."""
        soonest: float | None = None
        for owner in self._items:
            rest_s = self._paid_at.get(owner, 0.0) - BURST_S / self._share - now
            if rest_s <= 0:
                return owner, 0.0
            soonest = rest_s if soonest is None else min(soonest, rest_s)
        return None, soonest

    def _take_of(self, owner: Hashable) -> Item:
        items = self._items.pop(owner)
        item = items.popleft()
        if items:
            self._items[owner] = items  # after the others
        return item
