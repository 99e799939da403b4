"""Inbox: messages on their way from the IO thread to the engine thread, and the bounds of what waits on both sides."""

from queue import SimpleQueue

from core.inputs import EngineInput
from ipc.messages import Abort, AddRequest

#: Messages and bytes beyond which nothing of any client is read: what there is beside requests are aborts and calls.
MAX_MESSAGES = 131_072
MAX_BYTES = 512 << 20


class Inbox:
    """One producer (who holds the socket's lock) and one consumer (the engine thread); neither waits for the other.

    Each choice of a request is queued, with its tokens, from put() until the consumer says in settle() that it has
    begun or ended.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[int, EngineInput] | None] = SimpleQueue()
        # Written by the producer only:
        self._bytes_put = 0
        self._requests_put = 0
        self._tokens_put = 0
        self._requests_preparing = 0
        self._tokens_preparing = 0
        # Written by the consumer only:
        self._bytes_taken = 0
        self._requests_taken = 0
        self._tokens_taken = 0
        self._requests_settled = 0
        self._tokens_settled = 0
        self._ended = False

    @property
    def num_queued_requests(self) -> int:
        return self._requests_preparing + self._requests_put - self._requests_settled

    @property
    def num_queued_tokens(self) -> int:
        return self._tokens_preparing + self._tokens_put - self._tokens_settled

    @property
    def is_overfull(self) -> bool:
        """Nothing of a client should be put in."""
        return self._queue.qsize() >= MAX_MESSAGES or self._bytes_put - self._bytes_taken >= MAX_BYTES

    @property
    def is_empty(self) -> bool:
        return self._queue.empty()

    def put(self, client: int, message: EngineInput) -> None:
        self._bytes_put += _num_bytes(message)
        if isinstance(message, AddRequest):
            self._requests_put += message.params.n
            self._tokens_put += num_tokens(message)
        self._queue.put((client, message))

    def begin_preparation(self, message: AddRequest) -> None:
        """Count a request as queued that is put in later; for the producer."""
        self._requests_preparing += message.params.n
        self._tokens_preparing += num_tokens(message)

    def end_preparation(self, message: AddRequest) -> None:
        """The request is put in now, or never."""
        self._requests_preparing -= message.params.n
        self._tokens_preparing -= num_tokens(message)

    def put_end(self) -> None:
        """No request comes after this."""
        self._queue.put(None)

    @property
    def has_ended(self) -> bool:
        """The end was drained; for the consumer."""
        return self._ended

    def drain(self) -> list[tuple[int, EngineInput]]:
        """Everything put so far, in order."""
        items: list[tuple[int, EngineInput]] = []
        for _ in range(self._queue.qsize()):
            item = self._queue.get_nowait()
            if item is None:
                self._ended = True
            else:
                self._take(item[1])
                items.append(item)
        return items

    def settle(self, num_waiting: int, num_waiting_tokens: int) -> None:
        """Of the requests taken so far, these still wait to begin."""
        self._requests_settled = self._requests_taken - num_waiting
        self._tokens_settled = self._tokens_taken - num_waiting_tokens

    def _take(self, message: EngineInput) -> None:
        self._bytes_taken += _num_bytes(message)
        if isinstance(message, AddRequest):
            self._requests_taken += message.params.n
            self._tokens_taken += num_tokens(message)


def num_tokens(message: AddRequest) -> int:
    """Of the prompt, which each choice has, and of what was delivered."""
    return (message.params.n * len(message.prompt_token_ids) + sum(map(len, message.delivered))) // 4


def _num_bytes(message: EngineInput) -> int:
    if isinstance(message, AddRequest):
        return len(message.prompt_token_ids) + sum(map(len, message.delivered))
    return len(message.numbers) if isinstance(message, Abort) else 0
