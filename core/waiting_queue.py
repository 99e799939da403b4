"""WaitingQueue: requests that have no row, first come first served."""

from collections import deque

from core.request import Request

#: Finished requests the queue may hold beside as many as wait.
_MAX_SPARE = 64


class WaitingQueue:
    """Every operation is O(1), amortized: an aborted request is marked finished and dropped later, at the head or when
    such requests are the most of the queue."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, request: Request) -> None:
        self._queue.append(request)
        self._length += 1

    def prepend(self, request: Request) -> None:
        """Back to the head: a preempted request is older than every waiting one."""
        self._queue.appendleft(request)
        self._length += 1

    def discard(self, request: Request) -> None:
        """The request, which is in the queue, will not be given out again."""
        request.is_finished = True
        self._length -= 1
        if len(self._queue) > 2 * self._length + _MAX_SPARE:
            self._queue = deque(waiting for waiting in self._queue if not waiting.is_finished)

    def head(self) -> Request | None:
        while self._queue and self._queue[0].is_finished:
            self._queue.popleft()
        return self._queue[0] if self._queue else None

    def pop_head(self) -> None:
        """Remove what head() has returned."""
        self._queue.popleft()
        self._length -= 1
