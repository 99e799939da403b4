"""Inbox: the bounded queue of messages from the IO thread to the engine thread."""

import time
from queue import SimpleQueue

from core.inputs import EngineInput, ExecutorNews, StoreNews
from ipc.params.pooling_params import PoolingParams
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import Abort, Submission
from ipc.wire.scheduling_messages import Explain

#: Units of work that the engine thread accepts before a step, at about 20 microseconds each. The rest waits for later
#: steps. A unit is a choice of a request, 1024 of its tokens, 256 numbers among its parameters, or a number of an Abort
#: (5 microseconds for a waiting request, 50 for a running one).
WORK_PER_STEP = 128
#: After a longer step more is accepted: as much as takes this share of it. Otherwise one caller's 2,048 prompts would
#: keep those of others waiting for 32 steps, which are seconds each if prompts are computed.
_UNIT_NS, _SHARE = 20_000, 32
#: The most numbers in an Abort. Longer ones are split.
MAX_ABORTED_AT_ONCE = 128
_EXPLAIN_WORK = WORK_PER_STEP  # for 1000 requests
#: Queued messages and bytes above which no client is read. Requests have their own limits; aborts and calls do not.
MAX_MESSAGES = 131_072
MAX_BYTES = 512 << 20


class Inbox:
    """A queue with one producer (the thread that holds the socket's lock) and one consumer (the engine thread).

    Neither waits for the other. Each choice of a request, with its tokens, counts as queued from put() until the
    consumer reports in settle() that it has started or ended.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[int, EngineInput, int] | None] = SimpleQueue()
        # Written only by the producer:
        self._bytes_put = 0
        self._requests_put = 0
        self._tokens_put = 0
        self._requests_preparing = 0
        self._tokens_preparing = 0
        # Written only by the consumer:
        self._bytes_taken = 0
        self._requests_taken = 0
        self._tokens_taken = 0
        self._requests_settled = 0
        self._tokens_settled = 0
        self._ended = False
        self._most_work = WORK_PER_STEP
        self._received_ns: list[int] = []

    @property
    def num_queued_requests(self) -> int:
        """Return the number of choices that have not started, including those in preparation."""
        return self._requests_preparing + self._requests_put - self._requests_settled

    @property
    def num_queued_tokens(self) -> int:
        """Return the number of tokens of these choices; see num_tokens()."""
        return self._tokens_preparing + self._tokens_put - self._tokens_settled

    @property
    def is_overfull(self) -> bool:
        """Return whether the queue is at its limits, so that no client should be read."""
        return self._queue.qsize() >= MAX_MESSAGES or self._bytes_put - self._bytes_taken >= MAX_BYTES

    @property
    def is_empty(self) -> bool:
        """Return whether no message waits for the consumer."""
        return self._queue.empty()

    def put_abort(self, client: int, abort: Abort) -> None:
        """Queue an Abort, split into parts. For the producer."""
        numbers, choices = abort.numbers, abort.choices
        for at in range(0, len(numbers), 4 * MAX_ABORTED_AT_ONCE):
            end = at + 4 * MAX_ABORTED_AT_ONCE
            self.put(client, Abort(numbers[at:end], choices[at // 2 : end // 2]))

    def put(self, client: int, message: EngineInput) -> None:
        """Queue a client's message. For the producer."""
        self._bytes_put += _num_bytes(message)
        if isinstance(message, Submission):
            self._requests_put += message.params.n
            self._tokens_put += num_tokens(message)
        self._queue.put((client, message, time.monotonic_ns()))

    def put_news(self, client: int, message: ExecutorNews | StoreNews) -> None:
        """Queue news from the executor or the store of KV blocks. For any thread, because it counts nothing."""
        self._queue.put((client, message, time.monotonic_ns()))

    def begin_preparation(self, message: Submission) -> None:
        """Count a request as queued before its put(). For the producer."""
        self._requests_preparing += message.params.n
        self._tokens_preparing += num_tokens(message)

    def end_preparation(self, message: Submission) -> None:
        """Undo begin_preparation(), before the request's put() or when it is dropped. For the producer."""
        self._requests_preparing -= message.params.n
        self._tokens_preparing -= num_tokens(message)

    def put_end(self) -> None:
        """Mark the end: no message follows. For the producer."""
        self._queue.put(None)

    @property
    def has_ended(self) -> bool:
        """Return whether drain() has reached the end. For the consumer."""
        return self._ended

    def drain(self) -> list[tuple[int, EngineInput]]:
        """Take queued (client, message) pairs in order, up to the work that the last step allows. For the consumer."""
        items: list[tuple[int, EngineInput]] = []
        self._received_ns = []
        num_left, work = self._queue.qsize(), 0
        while num_left and work < self._most_work:
            num_left -= 1
            item = self._queue.get_nowait()
            if item is None:
                self._ended = True
            else:
                client, message, received_ns = item
                self._take(message)
                items.append((client, message))
                self._received_ns.append(received_ns)
                work += _work(message)
        return items

    def received_ns(self) -> list[int]:
        """Return when each message of the last drain() was put, in monotonic ns. For the consumer."""
        return self._received_ns

    def settle(self, num_waiting: int, num_waiting_tokens: int, step_ns: int = 0) -> None:
        """Report how many of the choices taken so far, with how many tokens, have not started. For the consumer.

        step_ns: how long the last step took.
        """
        self._most_work = max(WORK_PER_STEP, step_ns // (_UNIT_NS * _SHARE))
        self._requests_settled = self._requests_taken - num_waiting
        self._tokens_settled = self._tokens_taken - num_waiting_tokens

    def _take(self, message: EngineInput) -> None:
        self._bytes_taken += _num_bytes(message)
        if isinstance(message, Submission):
            self._requests_taken += message.params.n
            self._tokens_taken += num_tokens(message)


def _work(message: EngineInput) -> int:
    """Return what a message costs the engine thread, in units of WORK_PER_STEP."""
    if isinstance(message, Submission):
        return message.params.n + num_tokens(message) // 1024 + _num_numbers(message.params) // 256
    if isinstance(message, Abort):
        return 1 + len(message.numbers) // 4  # numbers of 4 bytes
    return _EXPLAIN_WORK if isinstance(message, Explain) else 1


def _num_numbers(params: SamplingParams | PoolingParams) -> int:
    """Return the total length of the parameters that may be long."""
    if isinstance(params, PoolingParams):
        return 0
    lists = params.logit_bias, params.allowed_token_ids, params.stop_token_ids, params.bad_words_token_ids
    return sum([len(one) for one in lists if one])


def num_tokens(message: Submission) -> int:
    """Return the number of a request's tokens: the prompt's once per choice, plus the delivered ones."""
    return (message.params.n * len(message.prompt_token_ids) + sum(map(len, message.delivered))) // 4


def _num_bytes(message: EngineInput) -> int:
    if isinstance(message, Submission):
        return len(message.prompt_token_ids) + sum(map(len, message.delivered))
    return len(message.numbers) if isinstance(message, Abort) else 0
