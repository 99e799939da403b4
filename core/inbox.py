"""Inbox: messages on their way from the IO thread to the engine thread, bounded in number and bytes."""

from queue import Empty, SimpleQueue

from core.engine import EngineInput
from ipc.messages import Abort, AddRequest

MAX_MESSAGES = 65_536
MAX_BYTES = 256 << 20


class Inbox:
    """One producer (the IO thread) and one consumer (the engine thread); neither waits for the other."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[int, EngineInput] | None] = SimpleQueue()
        self._bytes_put = 0  # written by the producer only
        self._bytes_taken = 0  # written by the consumer only
        self._ended = False  # consumer only

    @property
    def is_full(self) -> bool:
        """No further request should be put in."""
        return self._queue.qsize() >= MAX_MESSAGES or self._bytes_put - self._bytes_taken >= MAX_BYTES

    @property
    def is_overfull(self) -> bool:
        """Nothing of a client should be put in: what there is beyond the bounds are aborts and calls."""
        return self._queue.qsize() >= 2 * MAX_MESSAGES or self._bytes_put - self._bytes_taken >= 2 * MAX_BYTES

    def put(self, client: int, message: EngineInput) -> None:
        self._bytes_put += _num_bytes(message)
        self._queue.put((client, message))

    def put_end(self) -> None:
        """No request comes after this."""
        self._queue.put(None)

    @property
    def has_ended(self) -> bool:
        """The end was drained; for the consumer."""
        return self._ended

    def drain(self, *, wait: bool) -> list[tuple[int, EngineInput]]:
        """Everything put so far, in order. wait: until there is something (or the end)."""
        items: list[tuple[int, EngineInput]] = []
        item = self._queue.get() if wait else None
        try:
            if not wait:
                item = self._queue.get_nowait()
            while True:
                if item is None:
                    self._ended = True
                else:
                    self._bytes_taken += _num_bytes(item[1])
                    items.append(item)
                item = self._queue.get_nowait()
        except Empty:
            return items


def _num_bytes(message: EngineInput) -> int:
    if isinstance(message, AddRequest):
        return len(message.prompt_token_ids) + sum(map(len, message.delivered))
    return len(message.numbers) if isinstance(message, Abort) else 0
