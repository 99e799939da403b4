"""WaitingQueue: requests that have no row, in the order of the scheduling policy.

Some requests wait separately: those of a client on hold, choices whose prompt another choice computes, requests whose
blocks are being fetched, and, while the queue is shut, requests that have not started.
"""

from collections.abc import Collection

from core.batch.request import Request
from core.scheduling.waiting_lines import Entry, FairLine, Line


class WaitingQueue:
    """Waiting requests: ready ones, those of clients on hold, those that wait for a choice or blocks, and those set
    aside.

    shut() sets aside requests that have not started. num_tokens: tokens of all waiting requests.
    """

    def __init__(self, line: Line | FairLine) -> None:
        self._line = line
        self._held: dict[int, dict[tuple[int, int], Request]] = {}  # by client; (number, choice), in order of arrival
        self._num_held = 0
        self._aside: dict[tuple[int, int, int], Request] = {}  # followers, and requests that wait for blocks; by key
        self._unbegun: dict[tuple[int, int, int], Request] | None = None  # by client, number, choice; None = not shut
        self.num_tokens = 0

    def __len__(self) -> int:
        """Return the number of all waiting requests."""
        return len(self._line) + self._num_held + len(self._aside) + self.num_unbegun

    @property
    def num_ready(self) -> int:
        """Return the number of requests that may start."""
        return len(self._line)

    @property
    def num_held(self) -> int:
        """Return the number of requests of clients on hold."""
        return self._num_held

    @property
    def held_clients(self) -> Collection[int]:
        """Return the clients on hold."""
        return self._held.keys()

    @property
    def num_unbegun(self) -> int:
        """Return the number of requests that wait for the queue to reopen."""
        return len(self._unbegun) if self._unbegun is not None else 0

    @property
    def is_shut(self) -> bool:
        """Return whether the queue is shut."""
        return self._unbegun is not None

    def shut(self) -> None:
        """Set aside requests that have not started, including those that arrive later. O(n log n)."""
        if self._unbegun is None:
            self._unbegun = {}
            for request in self._line.in_order():
                if not request.has_started:
                    self._line.discard(request)
                    self._unbegun[_key(request)] = request

    def open(self) -> None:
        """Reopen the queue. Requests set aside by shut() return to their places."""
        unbegun, self._unbegun = self._unbegun, None
        for request in (unbegun or {}).values():
            self._line.push(request)

    def push(self, request: Request) -> None:
        """Add a request without a row to the part of the queue where it belongs."""
        self.num_tokens += len(request.token_ids)
        lane = self._held.get(request.client)
        if lane is None:
            if request.follows or request.awaits:
                self._aside[_key(request)] = request
            elif self._unbegun is not None and not request.has_started:
                self._unbegun[_key(request)] = request
            else:
                self._line.push(request)
        else:
            lane[request.number, request.choice] = request
            self._num_held += 1

    def discard(self, request: Request) -> None:
        """Remove a waiting request, no matter in which part it waits."""
        self.num_tokens -= len(request.token_ids)
        lane = self._held.get(request.client)
        if lane is None:
            if request.follows or request.awaits:
                del self._aside[_key(request)]
            elif self._unbegun is None or self._unbegun.pop(_key(request), None) is None:
                self._line.discard(request)
        else:
            del lane[request.number, request.choice]
            self._num_held -= 1

    def follow(self, request: Request, follows: bool) -> None:
        """Make a waiting request wait for another choice of its message, or stop that."""
        if self.is_held(request.client):
            request.follows = follows  # it keeps its place in the lane
            return
        self.discard(request)
        request.follows = follows
        self.push(request)

    def await_blocks(self, request: Request, ticket: int) -> None:
        """Make a waiting request wait for the blocks of this ticket; 0 stops that."""
        if self.is_held(request.client):
            request.awaits = ticket
            return
        self.discard(request)
        request.awaits = ticket
        self.push(request)

    def peek(self) -> Request | None:
        """Return the first request that may start, or None."""
        return self._line.peek()

    def pop(self) -> Request | None:
        """Remove the first request that may start and return it, or None."""
        request = self._line.pop()
        if request is not None:
            self.num_tokens -= len(request.token_ids)
        return request

    def ready(self, count: int) -> list[Request]:
        """Return the first `count` requests that may start, in order; O(n log count)."""
        return self._line.first(count)

    def entries(self) -> list[Entry]:
        """Return the entries of all requests that may start, and stale ones, in no particular order. O(n)."""
        return self._line.entries()

    def position(self, request: Request) -> int | None:
        """Return how many requests may start before this one, or None if it may not start. O(n)."""
        return self._line.position(request) if request.ticket else None

    def is_held(self, client: int) -> bool:
        """Return whether the client is on hold."""
        return client in self._held

    def hold(self, client: int, requests: list[Request]) -> None:
        """Put the client on hold: its requests may not start, including those that arrive later.

        requests: all requests of the client, in order of arrival. All of them are waiting.
        """
        for request in requests:
            self.discard(request)
        self._held[client] = {}
        for request in requests:
            self.push(request)

    def release(self, client: int) -> list[Request]:
        """End the client's hold and return its requests, which are no longer in the queue."""
        released = list(self._held.pop(client, {}).values())
        self._num_held -= len(released)
        self.num_tokens -= sum(request.num_tokens for request in released)
        return released

    def unbegun(self) -> list[Request]:
        """Return all requests that wait for the queue to reopen, in the order in which they were set aside."""
        return list(self._unbegun.values()) if self._unbegun is not None else []

    def aside(self) -> list[Request]:
        """Return all requests that wait for another choice or for blocks, in the order of their arrival here."""
        return list(self._aside.values())

    def held(self) -> list[Request]:
        """Return all requests of clients on hold."""
        return [request for lane in self._held.values() for request in lane.values()]


def _key(request: Request) -> tuple[int, int, int]:
    return request.client, request.number, request.choice
