"""WaitingQueue: requests that have no row, first come first served; those of a client on hold wait apart."""

from collections import deque

from core.request import Request

#: Finished requests the queue may hold beside as many as wait.
_MAX_SPARE = 64


class WaitingQueue:
    """Every operation on a request is O(1), amortized: an aborted one is marked finished and dropped later, at the head
    or when such requests are the most of the queue.

    num_tokens: of all that wait, those on hold included; num_ready: requests that may start.
    """

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()
        self._held: dict[int, dict[int, Request]] = {}  # by client and number, in order of arrival
        self._num_held = 0
        self.num_ready = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return self.num_ready + self._num_held

    def append(self, request: Request) -> None:
        self.num_tokens += request.num_tokens
        lane = self._held.get(request.client)
        if lane is None:
            self._queue.append(request)
            self.num_ready += 1
        else:
            lane[request.number] = request
            self._num_held += 1

    def prepend(self, request: Request) -> None:
        """Back to the head: a preempted request is older than every waiting one. Its client is not on hold."""
        self._queue.appendleft(request)
        self.num_ready += 1
        self.num_tokens += request.num_tokens

    def discard(self, request: Request) -> None:
        """The request, which is in the queue, will not be given out again."""
        request.is_finished = True
        self.num_tokens -= request.num_tokens
        lane = self._held.get(request.client)
        if lane is not None:
            del lane[request.number]
            self._num_held -= 1
            return
        self.num_ready -= 1
        if len(self._queue) > 2 * self.num_ready + _MAX_SPARE:
            self._queue = deque(waiting for waiting in self._queue if not waiting.is_finished)

    def head(self) -> Request | None:
        while self._queue and self._queue[0].is_finished:
            self._queue.popleft()
        return self._queue[0] if self._queue else None

    def pop_head(self) -> None:
        """Remove what head() has returned."""
        self.num_tokens -= self._queue.popleft().num_tokens
        self.num_ready -= 1

    def hold(self, client: int, requests: list[Request]) -> None:
        """Requests of this client may not start, those that come later included. requests: all that it has, in order of
        arrival; none has a row, and those in the queue are taken out of it."""
        others = deque(waiting for waiting in self._queue if waiting.client != client and not waiting.is_finished)
        lane = {request.number: request for request in requests}
        self.num_tokens += sum(request.num_tokens for request in requests) - sum(
            waiting.num_tokens for waiting in self._queue if waiting.client == client and not waiting.is_finished
        )
        self._queue, self.num_ready = others, len(others)
        self._held[client] = lane
        self._num_held += len(lane)

    def release(self, client: int) -> list[Request]:
        """End the hold; the client's requests, which are no longer in the queue."""
        released = list(self._held.pop(client, {}).values())
        self._num_held -= len(released)
        self.num_tokens -= sum(request.num_tokens for request in released)
        return released
