"""Turns: a queue from which one thread takes an item of each client in turn."""

import threading
from collections import OrderedDict, deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Turns(Generic[Item]):
    """Items by client. A client's items keep their order; a client with many does not keep another one waiting."""

    def __init__(self) -> None:
        self._items: OrderedDict[int, deque[Item]] = OrderedDict()  # the client whose turn it is comes first
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, client: int, item: Item) -> None:
        """Add a client's item."""
        with self._changed:
            self._items.setdefault(client, deque()).append(item)
            self._changed.notify()

    def give_back(self, client: int, item: Item) -> None:
        """Put back an item that was taken, before the client's others. Other clients come first."""
        with self._changed:
            self._items.setdefault(client, deque()).appendleft(item)
            self._items.move_to_end(client)
            self._changed.notify()

    def close(self) -> None:
        """Let take() return None from now on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def take(self) -> Item | None:
        """Wait for an item and take it; None after close()."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._is_closed)
            if self._is_closed:
                return None
            client, items = self._items.popitem(last=False)
            item = items.popleft()
            if items:
                self._items[client] = items  # behind the others
            return item
