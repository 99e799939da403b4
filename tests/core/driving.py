"""Shared by the tests of core: drives a scheduler by hand or a whole EngineCore, and checks everything it says."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from core.batch.request import request_from_message
from core.engine import EngineCore
from core.execution.plan import NO_TOKEN, ModelRunnerOutput, SchedulerOutput
from core.execution.runner_table import RunnerTable
from core.executors.fake import choice_seed
from core.inputs import EngineInput, EngineReply
from core.scheduling.outputs import ClientOutput
from core.scheduling.scheduler import Scheduler
from ipc.options.resolved import ResolvedConfig
from ipc.params.sampling_params import SamplingParams
from ipc.tables.arrays import Int32s
from ipc.wire.messages import AddRequest, FinishReason, Outputs, RequestFailed
from ipc.wire.pin_messages import PinAnswer, Pinned
from tests.fake_options import fake_options
from tests.fake_tokens import fake_tokens
from tests.resolved import resolved_config
from tools.lab.check_scheduler.paged_executor import PagedExecutor

VOCAB_SIZE = 1000
EOS = 2


def small_config(
    num_blocks: int = 100,
    block_size: int = 4,
    max_num_seqs: int = 8,
    budget: int = 64,
    depth: int = 1,
    stages: int = 1,
    max_model_len: int | None = None,
    prefix_caching: bool = True,
    **options: Any,
) -> ResolvedConfig:
    """A resolved config of the fake executor; max_model_len defaults to all that the cache can hold."""
    return resolved_config(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        block_size=block_size,
        num_blocks_override=num_blocks,
        max_model_len=max_model_len or (num_blocks - 1) * block_size,
        pipeline_parallel_size=stages,
        async_scheduling=depth == 2 and stages == 1,
        enable_prefix_caching=prefix_caching,
        executor_options=fake_options(vocab_size=VOCAB_SIZE, eos_token_id=EOS) | options.pop("executor_options", {}),
        **options,
    )


def add_message(
    number: int,
    prompt: Sequence[int],
    max_tokens: int | None = 4,
    *,
    ignore_eos: bool = True,
    stop_token_ids: list[int] | None = None,
    min_tokens: int = 0,
    temperature: float = 0.0,
    seed: int = 0,
    salt: str = "",
    deadline_ms: int = 0,
    delivered: Sequence[int] | None = None,
    **options: Any,
) -> AddRequest:
    params = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        stop_token_ids=stop_token_ids,
        min_tokens=min_tokens,
        temperature=temperature,
        **options,
    )
    column = [] if delivered is None else [np.array(delivered, "<i4").tobytes()]
    prompt_ids = np.array(prompt, "<i4").tobytes()
    return AddRequest(number, prompt_ids, params, seed, 0, deadline_ms, salt, column)


@lru_cache(4096)
def _oracle(prompt: tuple[int, ...], count: int, seed: int) -> list[int]:
    return fake_tokens(list(prompt), count, VOCAB_SIZE, seed)


def expected_tokens(message: AddRequest, max_model_len: int, choice: int = 0) -> list[int]:
    """All that a choice of a request nobody aborts must give, by the one-request-at-a-time oracle."""
    prompt = np.frombuffer(message.prompt_token_ids, "<i4").tolist()
    params = message.params
    count = min(params.max_tokens or max_model_len, max_model_len - len(prompt))
    tokens = _oracle(tuple(prompt), count, choice_seed(message.seed, choice) if params.temperature > 0 else 0)
    stops = {*(params.stop_token_ids or []), *([] if params.ignore_eos else [EOS])}
    for end, token in enumerate(tokens, 1):
        if token in stops and end >= params.min_tokens:
            return tokens[:end]
    return list(tokens)


def unpack(message: Outputs) -> list[tuple[int, int, list[int], FinishReason]]:
    """Rows of the message: (number, position, tokens, finish)."""
    numbers = np.frombuffer(message.numbers, "<u4").tolist()
    positions = np.frombuffer(message.positions, "<u4").tolist()
    counts = np.frombuffer(message.counts, "<u2").tolist()
    tokens = np.frombuffer(message.tokens, "<i4").tolist()
    finish = np.frombuffer(message.finish, "u1").tolist() if message.finish else [0] * len(numbers)
    assert len(numbers) == len(positions) == len(counts) == len(finish)
    assert sum(counts) == len(tokens)
    rows = []
    for number, position, count, code in zip(numbers, positions, counts, finish, strict=True):
        rows.append((number, position, tokens[:count], FinishReason(code)))
        tokens = tokens[count:]
    return rows


@dataclass
class Received:
    """What a client has of one request."""

    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    failed: RequestFailed | None = None
    stop_token: int | None = None
    cached: int | None = None  # prompt tokens found in the prefix cache
    has_others: bool = False  # it is the first of several choices, which may fail after it has ended

    @property
    def is_over(self) -> bool:
        return self.finish is not None or self.failed is not None


class Inbox:
    """The clients' side: takes replies, and objects to a gap, a repetition or a second end.

    Choice c of request number n is booked as n + c.
    """

    def __init__(self) -> None:
        self.received: dict[tuple[int, int], Received] = {}
        self.pinned: dict[tuple[int, int], list[PinAnswer]] = {}

    def expect(self, client: int, message: AddRequest) -> Received:
        delivered = np.frombuffer(message.delivered[0], "<i4").tolist() if message.delivered else []
        for choice in range(1, message.params.n):
            self.received.setdefault((client, message.number + choice), Received())
        has_others = message.params.n > 1
        return self.received.setdefault((client, message.number), Received(list(delivered), has_others=has_others))

    def take(self, replies: Iterable[tuple[int, EngineReply]]) -> None:
        for client, reply in replies:
            if isinstance(reply, RequestFailed):
                entry = self.received[client, reply.number]
                is_first = not entry.is_over or (entry.has_others and entry.failed is None)
                assert is_first, f"{client}/{reply.number} ends twice"
                entry.failed = reply
            elif isinstance(reply, Pinned):
                self.pinned[client, reply.number] = reply.pins
            elif isinstance(reply, Outputs):
                self._take_outputs(client, reply)

    def _take_outputs(self, client: int, reply: Outputs) -> None:
        stop_tokens = dict(reply.stop_tokens)
        choices = np.frombuffer(reply.choices, "<u2").tolist() if reply.choices else [0] * (len(reply.numbers) // 4)
        for row, (number, position, tokens, finish) in enumerate(unpack(reply)):
            number += choices[row]
            entry = self.received[client, number]
            assert not entry.is_over, f"{client}/{number} goes on after its end"
            assert position == len(entry.tokens), f"{client}/{number}: position {position}, have {len(entry.tokens)}"
            assert tokens or finish, f"{client}/{number}: a row with nothing in it"
            entry.tokens += tokens
            entry.finish = finish or None
            entry.stop_token = stop_tokens.get(row)
        for number, cached in np.frombuffer(reply.started, "<u4").reshape(-1, 2).tolist():
            entry = self.received[client, number]
            assert entry.cached is None, f"{client}/{number} starts twice"
            entry.cached = cached


class Driver:
    """An EngineCore over a PagedExecutor with its clients; every step is followed by check_integrity()."""

    def __init__(
        self, config: ResolvedConfig, poison: int | None = None, executor: type[PagedExecutor] = PagedExecutor
    ) -> None:
        self.config = config
        self.executor = executor(config, poison)
        self.engine = EngineCore(config, self.executor)
        self.scheduler = self.engine.scheduler
        self.inbox = Inbox()
        self.log: list[tuple[list[tuple[int, EngineInput]], int, list[tuple[int, EngineReply]]]] = []  # every step

    def step(self, messages: Sequence[tuple[int, EngineInput]] = (), now_ns: int = 0) -> list[tuple[int, EngineReply]]:
        for client, message in messages:
            if isinstance(message, AddRequest):
                self.inbox.expect(client, message)
        replies = self.engine.step(messages, now_ns)
        self.log.append((list(messages), now_ns, replies))
        self.inbox.take(replies)
        self.scheduler.check_integrity()
        return replies

    def drain(self, limit: int = 2000, now_ns: int = 0) -> int:
        """Step until there is no work; all blocks have come back. Returns the number of steps."""
        for count in range(limit):
            if not self.engine.has_work:
                pool = self.scheduler.pool
                assert (pool.num_free, pool.num_fenced) == (pool.num_blocks - 1, 0)
                return count
            self.step(now_ns=now_ns)
        raise AssertionError(f"still at work after {limit} steps: {self.scheduler.get_request_counts()}")

    def run(self, *messages: AddRequest, client: int = 0) -> list[Received]:
        """Submit these together and drain."""
        self.step([(client, message) for message in messages])
        self.drain()
        return [self.inbox.received[client, message.number] for message in messages]


class ByHand:
    """A scheduler whose results are made up by the test: the executor's table decides who samples, `token` what."""

    def __init__(self, config: ResolvedConfig) -> None:
        self.scheduler = Scheduler(config, (EOS,))
        self.inbox = Inbox()
        self.mirror = RunnerTable(config.max_num_seqs, config.block_size)
        self._max_model_len = config.max_model_len or 0
        self._serial = 0
        self._samples: dict[int, npt.NDArray[np.bool_]] = {}

    def add(self, message: AddRequest, client: int = 0, deadline_ns: int = 0, now_ns: int = 0) -> Received:
        entry = self.inbox.expect(client, message)
        serial, length = self._serial, self._max_model_len
        requests = [request_from_message(message, client, serial + n, length, n) for n in range(message.params.n)]
        self._serial += message.params.n
        self.scheduler.add_request(requests, now_ns, deadline_ns)
        return entry

    def schedule(self, now_ns: int = 0) -> SchedulerOutput:
        plan = self.scheduler.schedule(now_ns)
        self.scheduler.check_integrity()
        if not plan.is_empty:
            self.mirror.apply(plan)
            self._samples[plan.step] = self.mirror.advance(plan)
            rows = plan.rows[self._samples[plan.step]]
            self.mirror.num_tokens[rows] += 1  # lengths matter, ids do not
        return plan

    def update(self, plan: SchedulerOutput, token: int | Callable[[int], int] = 7) -> list[ClientOutput]:
        """token: what every row samples, or a function of the row."""
        token_of = token if callable(token) else lambda _: token
        samples = self._samples.pop(plan.step)
        ids: Int32s = np.array(
            [token_of(row) if sampled else NO_TOKEN for row, sampled in zip(plan.rows.tolist(), samples, strict=True)],
            np.int32,
        )
        replies = self.scheduler.update_from_output(plan, ModelRunnerOutput(plan.step, ids))
        self.inbox.take(replies)
        self.scheduler.check_integrity()
        return replies

    def step(self, token: int | Callable[[int], int] = 7, now_ns: int = 0) -> dict[int, int]:
        """One step to its end. Returns {request number: scheduled tokens}, in the plan's order."""
        plan = self.schedule(now_ns)
        scheduled = self.scheduled(plan)
        if not plan.is_empty:
            self.update(plan, token)
        return scheduled

    def scheduled(self, plan: SchedulerOutput) -> dict[int, int]:
        numbers = self.scheduler.table.number[plan.rows].tolist()
        return dict(zip(numbers, plan.num_scheduled_tokens.tolist(), strict=True))

    def flush(self) -> None:
        """Hand out what is to be told without a step."""
        self.inbox.take(self.scheduler.take_outputs())
