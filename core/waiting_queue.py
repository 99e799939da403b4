"""WaitingQueue: requests that have no row, in the order of the scheduling policy; those of a client on hold wait
apart."""

from core.request import Request
from core.waiting_lines import FairLine, Line


class WaitingQueue:
    """num_tokens: of all that wait, those on hold included; num_ready: requests that may start."""

    def __init__(self, line: Line | FairLine) -> None:
        self._line = line
        self._held: dict[int, dict[tuple[int, int], Request]] = {}  # by client; (number, choice), in order of arrival
        self._num_held = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._line) + self._num_held

    @property
    def num_ready(self) -> int:
        return len(self._line)

    def push(self, request: Request) -> None:
        self.num_tokens += request.num_tokens
        lane = self._held.get(request.client)
        if lane is None:
            self._line.push(request)
        else:
            lane[request.number, request.choice] = request
            self._num_held += 1

    def discard(self, request: Request) -> None:
        """The request, which waits, does so no longer."""
        self.num_tokens -= request.num_tokens
        lane = self._held.get(request.client)
        if lane is None:
            self._line.discard(request)
        else:
            del lane[request.number, request.choice]
            self._num_held -= 1

    def peek(self) -> Request | None:
        """The first that may start."""
        return self._line.peek()

    def pop(self) -> Request | None:
        """Take out the first that may start."""
        request = self._line.pop()
        if request is not None:
            self.num_tokens -= request.num_tokens
        return request

    def ready(self) -> list[Request]:
        """All that may start, in order; O(n log n)."""
        return self._line.in_order()

    def is_held(self, client: int) -> bool:
        return client in self._held

    def hold(self, client: int, requests: list[Request]) -> None:
        """Requests of this client may not start, those that come later included. requests: all that it has, in order of
        arrival; all of them wait."""
        for request in requests:
            self.discard(request)
        self._held[client] = {}
        for request in requests:
            self.push(request)

    def release(self, client: int) -> list[Request]:
        """End the hold; the client's requests, which are no longer in the queue."""
        released = list(self._held.pop(client, {}).values())
        self._num_held -= len(released)
        self.num_tokens -= sum(request.num_tokens for request in released)
        return released
