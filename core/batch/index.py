"""RequestIndex: the live requests by (client, number), with one entry per choice, and by deadline."""

import heapq
from itertools import chain
from typing import Any

from core.batch.request import Request

#: Deadlines of finished requests that the heap may hold, in addition to one for each live request.
_MAX_SPARE = 64


class RequestIndex:
    """The live requests, one per choice."""

    def __init__(self) -> None:
        self._clients: dict[int, dict[int, list[Request]]] = {}
        self._deadlines: list[tuple[int, int, Request]] = []  # heap of (now_ns at which it fails, serial, request)
        self._length = 0

    def __len__(self) -> int:
        """Return the number of live requests."""
        return self._length

    def get(self, client: int, number: int) -> list[Request]:
        """Return the live choices of a number, in order; empty if there are none."""
        return list(self._clients.get(client, {}).get(number, ()))

    def has(self, client: int, number: int) -> bool:
        """Return whether any choice of a number is live."""
        return number in self._clients.get(client, ())

    def of_client(self, client: int) -> list[Request]:
        """Return the client's requests in order of arrival."""
        return [request for choices in self._clients.get(client, {}).values() for request in choices]

    def all(self) -> list[Request]:
        """Return every live request; O(n)."""
        return [request for client in self._clients for request in self.of_client(client)]

    def parts(self) -> dict[str, Any]:
        """Return the index as one list, for a snapshot (core/capture/snapshot.py)."""
        numbers = chain.from_iterable(map(dict.values, self._clients.values()))
        return {**self.__dict__, "_clients": list(chain.from_iterable(numbers))}

    def set_parts(self, parts: dict[str, Any]) -> None:
        """Load the state that parts() returned."""
        requests: list[Request] = parts["_clients"]
        self.__dict__.update(parts, _clients={})
        for request in requests:
            self._clients.setdefault(request.client, {}).setdefault(request.number, []).append(request)

    def add(self, request: Request, deadline_ns: int) -> None:
        """Add a request. deadline_ns: on the clock of the step; 0 = none."""
        self._clients.setdefault(request.client, {}).setdefault(request.number, []).append(request)
        self._length += 1
        if deadline_ns:
            heapq.heappush(self._deadlines, (deadline_ns, request.serial, request))

    def remove(self, requests: list[Request]) -> None:
        """Remove requests that are already marked as finished."""
        for request in requests:
            numbers = self._clients[request.client]
            choices = numbers[request.number]
            if len(choices) > 1:
                choices.remove(request)
            else:
                del numbers[request.number]
                if not numbers:
                    del self._clients[request.client]
        self._length -= len(requests)
        if len(self._deadlines) > 2 * self._length + _MAX_SPARE:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].is_finished]
            heapq.heapify(self._deadlines)

    def pop_overdue(self, now_ns: int, limit: int) -> list[Request]:
        """Remove and return at most `limit` requests whose deadline has passed, without finished ones."""
        overdue: list[Request] = []
        while self._deadlines and self._deadlines[0][0] <= now_ns and len(overdue) < limit:
            request = heapq.heappop(self._deadlines)[2]
            if not request.is_finished:
                overdue.append(request)
        return overdue
