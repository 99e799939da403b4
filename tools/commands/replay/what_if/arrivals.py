"""Arrivals: when the requests of a recording arrive in a simulation."""

import heapq
from collections.abc import Sequence
from itertools import pairwise

from tools.commands.replay.what_if.recording import Recorded


class Arrivals:
    """A queue of requests by the time of their arrival.

    A client that never had two requests at once in the capture waits for its answer, and then for as long as it did
    (closed loop). All others send at their recorded times (open loop).
    """

    def __init__(self, requests: Sequence[Recorded], *, is_open: bool) -> None:
        """is_open: keep the recorded times of all clients."""
        self._queue = list[tuple[int, int]]()  # (ns, index), a heap
        self._next: dict[int, tuple[int, int]] = {}  # by index: (index of the client's next one, its think time in ns)
        of_client: dict[int, list[int]] = {}
        for index, one in enumerate(requests):
            of_client.setdefault(one.client, []).append(index)
        for indices in of_client.values():
            thinks = {
                first: (second, requests[second].received_ns - requests[first].ended_ns)
                for first, second in pairwise(indices)
            }
            waits = all(requests[first].ended_ns and ns >= 0 for first, (_, ns) in thinks.items())
            if waits and not is_open:
                self._next |= thinks
                indices = indices[:1]
            self._queue += [(requests[index].received_ns, index) for index in indices]
        heapq.heapify(self._queue)

    @property
    def next_ns(self) -> int | None:
        """Return when the next request arrives; None: no request is on its way."""
        return self._queue[0][0] if self._queue else None

    def take(self, now_ns: int) -> list[tuple[int, int]]:
        """Return the (ns, index) of the requests that have arrived by now, and forget them."""
        taken = []
        while self._queue and self._queue[0][0] <= now_ns:
            taken.append(heapq.heappop(self._queue))
        return taken

    def note_end(self, index: int, now_ns: int) -> None:
        """Note that a request has ended, for which its client may have waited."""
        if index in self._next:
            following, think_ns = self._next.pop(index)
            heapq.heappush(self._queue, (now_ns + think_ns, following))
