"""WaitingQueue: requests that have no row, in the order of the scheduling policy; those of a client on hold wait
apart, and so do those that have not begun while the queue is shut."""

from core.batch.request import Request
from core.scheduling.waiting_lines import FairLine, Line


class WaitingQueue:
    """num_tokens: of all that wait, those on hold included; num_ready: requests that may start."""

    def __init__(self, line: Line | FairLine) -> None:
        self._line = line
        self._held: dict[int, dict[tuple[int, int], Request]] = {}  # by client; (number, choice), in order of arrival
        self._num_held = 0
        self._unbegun: dict[tuple[int, int, int], Request] | None = None  # by client, number, choice; None = not shut
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._line) + self._num_held + self.num_unbegun

    @property
    def num_ready(self) -> int:
        return len(self._line)

    @property
    def num_held(self) -> int:
        """Requests of clients on hold."""
        return self._num_held

    @property
    def num_unbegun(self) -> int:
        """Requests that wait for the queue to be opened."""
        return len(self._unbegun) if self._unbegun is not None else 0

    @property
    def is_shut(self) -> bool:
        return self._unbegun is not None

    def shut(self) -> None:
        """Requests that have not begun may not start, those that come later included. O(n log n)."""
        if self._unbegun is None:
            self._unbegun = {}
            for request in self._line.in_order():
                if not request.has_started:
                    self._line.discard(request)
                    self._unbegun[_key(request)] = request

    def open(self) -> None:
        """They may, in their places."""
        unbegun, self._unbegun = self._unbegun, None
        for request in (unbegun or {}).values():
            self._line.push(request)

    def push(self, request: Request) -> None:
        self.num_tokens += request.num_tokens
        lane = self._held.get(request.client)
        if lane is None:
            if self._unbegun is not None and not request.has_started:
                self._unbegun[_key(request)] = request
            else:
                self._line.push(request)
        else:
            lane[request.number, request.choice] = request
            self._num_held += 1

    def discard(self, request: Request) -> None:
        """The request, which waits, does so no longer."""
        self.num_tokens -= request.num_tokens
        lane = self._held.get(request.client)
        if lane is None:
            if self._unbegun is None or self._unbegun.pop(_key(request), None) is None:
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
            self.num_tokens -= len(request.token_ids)
        return request

    def ready(self, count: int) -> list[Request]:
        """The first `count` that may start, in order; O(n)."""
        return self._line.first(count)

    def position(self, request: Request) -> int | None:
        """How many may start before this one; None where it may not. O(n)."""
        return self._line.position(request) if request.ticket else None

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

    def unbegun(self) -> list[Request]:
        """All that wait for the queue to be opened, in the order in which they came to it."""
        return list(self._unbegun.values()) if self._unbegun is not None else []

    def held(self) -> list[Request]:
        """All of clients on hold."""
        return [request for lane in self._held.values() for request in lane.values()]


def _key(request: Request) -> tuple[int, int, int]:
    return request.client, request.number, request.choice
