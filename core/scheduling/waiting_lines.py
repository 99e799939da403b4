"""The orders in which requests wait: one queue for all, or one per client, with the least served client first."""

import heapq
from typing import TypeAlias

from core.batch.request import Request
from core.scheduling.virtual_time import VirtualTime

#: (rank, serial, ticket, request) in a line; stale if the ticket is not the request's current one.
Entry: TypeAlias = tuple[int, int, int, Request]
#: Stale entries that a line may hold in addition to one for each waiting request.
_MAX_SPARE = 64


class Line:
    """A queue ordered by (rank, serial).

    push and pop are O(log n). discard is O(1) amortized, because it leaves a stale entry behind.
    """

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._num_pushed = 0  # the last ticket
        self._length = 0

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return self._length

    def push(self, request: Request) -> None:
        """Add a request."""
        self._num_pushed += 1
        request.ticket = self._num_pushed
        heapq.heappush(self._heap, (request.rank, request.serial, request.ticket, request))
        self._length += 1

    def discard(self, request: Request) -> None:
        """Remove a request that waits here."""
        request.ticket = 0
        self._length -= 1
        if len(self._heap) > 2 * self._length + _MAX_SPARE:
            self._heap = [entry for entry in self._heap if entry[2] == entry[3].ticket]
            heapq.heapify(self._heap)

    def peek(self) -> Request | None:
        """Return the first request, or None if the line is empty."""
        heap = self._heap
        while heap and heap[0][2] != heap[0][3].ticket:
            heapq.heappop(heap)
        return heap[0][3] if heap else None

    def pop(self) -> Request | None:
        """Remove the first request and return it, or None if the line is empty."""
        while self._heap:
            _, _, ticket, request = heapq.heappop(self._heap)
            if ticket == request.ticket:
                request.ticket = 0
                self._length -= 1
                return request
        return None

    def first(self, count: int) -> list[Request]:
        """Return the first `count` requests in order; O(count log count), plus the stale entries that are skipped.

        A heap entry is never before its parent, so the next one is a child of one already taken.
        """
        heap, found = self._heap, list[Request]()
        frontier = [(heap[0][:3], 0)] if heap else []
        while frontier and len(found) < count:
            _, at = heapq.heappop(frontier)
            entry = heap[at]
            if entry[2] == entry[3].ticket:
                found.append(entry[3])
            for child in range(2 * at + 1, min(2 * at + 3, len(heap))):
                heapq.heappush(frontier, (heap[child][:3], child))
        return found

    def position(self, request: Request) -> int:
        """Return how many requests are before this waiting request; O(n)."""
        key = (request.rank, request.serial, request.ticket)
        return sum([1 for entry in self._heap if entry < key and entry[2] == entry[3].ticket])

    def entries(self) -> list[Entry]:
        """Return the entries of all requests, and stale ones, in no particular order. O(n)."""
        return self._heap.copy()

    def in_order(self) -> list[Request]:
        """Return all requests in order; O(n log n)."""
        return [entry[3] for entry in sorted(self._heap, key=lambda entry: entry[:3]) if entry[2] == entry[3].ticket]


class FairLine:
    """One line per client or tenant. The one served least, in virtual time, goes first."""

    def __init__(self, times: VirtualTime) -> None:
        self._times = times
        self._lines: dict[int, Line] = {}
        self._heap: list[tuple[int, bool, int]] = []  # the client's place when it was added; one entry per line
        self._length = 0

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return self._length

    def push(self, request: Request) -> None:
        """Add a request."""
        line = self._lines.get(request.party)
        if line is None:
            line = self._lines[request.party] = Line()
            heapq.heappush(self._heap, self._times.place(request.party))
        line.push(request)
        self._length += 1

    def discard(self, request: Request) -> None:
        """Remove a request that waits here."""
        self._lines[request.party].discard(request)
        self._length -= 1

    def peek(self) -> Request | None:
        """Return the first request, or None if nothing waits."""
        heap = self._heap
        while heap:
            entered = heap[0]
            client = entered[-1]
            first = self._lines[client].peek()
            if first is None:
                del self._lines[client]
                heapq.heappop(heap)
            elif (now := self._times.place(client)) != entered:
                heapq.heapreplace(heap, now)
            else:
                return first
        return None

    def pop(self) -> Request | None:
        """Remove the first request and return it, or None if nothing waits."""
        first = self.peek()
        if first is not None:
            self._lines[first.party].pop()
            self._length -= 1
        return first

    def entries(self) -> list[Entry]:
        """Return the entries of all requests, and stale ones, in no particular order. O(n)."""
        return [entry for line in self._lines.values() for entry in line.entries()]

    def in_order(self) -> list[Request]:
        """Return all requests in the order that holds as long as no client is served; O(n log n)."""
        return [request for client in self._clients() for request in self._lines[client].in_order()]

    def first(self, count: int) -> list[Request]:
        """Return the first `count` requests in the order that holds as long as no client is served."""
        requests: list[Request] = []
        for client in self._clients():
            if len(requests) >= count:
                break
            requests += self._lines[client].first(count - len(requests))
        return requests

    def position(self, request: Request) -> int:
        """Return how many requests are before this waiting request.

        The order is the one that holds as long as no client is served.
        """
        before = self._lines[request.party].position(request)
        for client in self._clients():
            if client == request.party:
                break
            before += len(self._lines[client])
        return before

    def _clients(self) -> list[int]:
        """Return the clients that have waiting requests, least served first."""
        return sorted((client for client in self._lines if len(self._lines[client])), key=self._times.place)
