"""Shared by the tests of core: drives a scheduler by hand or a whole EngineCore, and checks everything it says.

PagedExecutor keeps what a KV cache would hold and reads every context back through the block tables, so that a block
given away too early, shared wrongly or named wrongly is seen at once; the plain fake executor never looks at blocks.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from core.batch.request import request_from_message
from core.engine import EngineCore
from core.execution.plan import FAILED_TOKEN, NO_TOKEN, ModelRunnerOutput, SchedulerOutput, encode_plan
from core.execution.runner_table import RunnerTable
from core.executors.fake import FakeExecutor, choice_seed, mix, next_token
from core.inputs import EngineInput, EngineReply
from core.scheduling.outputs import ClientOutput
from core.scheduling.scheduler import Scheduler
from ipc.arrays import Int32s, UInt64s
from ipc.config import EngineConfig
from ipc.messages import AddRequest, FinishReason, Outputs, RequestFailed
from ipc.sampling_params import SamplingParams
from tests.fake_tokens import fake_tokens

VOCAB_SIZE = 1000
EOS = 2


#: What core/process/resolve.py would have set.
RESOLVED = {"num_swap_blocks": 0, "recompute_ns_per_token": 1, "swap_ns_per_block": 1}


def small_config(
    num_blocks: int = 100,
    block_size: int = 4,
    max_num_seqs: int = 8,
    budget: int = 64,
    depth: int = 1,
    max_model_len: int | None = None,
    prefix_caching: bool = True,
    **options: Any,
) -> EngineConfig:
    """A resolved config of the fake executor; max_model_len defaults to all that the cache can hold."""
    return EngineConfig(
        executor="fake",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        block_size=block_size,
        num_blocks_override=num_blocks,
        max_model_len=max_model_len or (num_blocks - 1) * block_size,
        async_scheduling=depth == 2,
        enable_prefix_caching=prefix_caching,
        fake_vocab_size=VOCAB_SIZE,
        **{"fake_eos_token_id": EOS, **RESOLVED, **options},
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


def expected_tokens(message: AddRequest, max_model_len: int) -> list[int]:
    """All that a request nobody aborts must give, by the one-request-at-a-time oracle."""
    prompt = np.frombuffer(message.prompt_token_ids, "<i4").tolist()
    params = message.params
    count = min(params.max_tokens or max_model_len, max_model_len - len(prompt))
    tokens = _oracle(tuple(prompt), count, message.seed if params.temperature > 0 else 0)
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

    @property
    def is_over(self) -> bool:
        return self.finish is not None or self.failed is not None


class Inbox:
    """The clients' side: takes replies, and objects to a gap, a repetition or a second end."""

    def __init__(self) -> None:
        self.received: dict[tuple[int, int], Received] = {}

    def expect(self, client: int, message: AddRequest) -> Received:
        delivered = np.frombuffer(message.delivered[0], "<i4").tolist() if message.delivered else []
        return self.received.setdefault((client, message.number), Received(list(delivered)))

    def take(self, replies: Iterable[tuple[int, EngineReply]]) -> None:
        for client, reply in replies:
            if isinstance(reply, RequestFailed):
                entry = self.received[client, reply.number]
                assert not entry.is_over, f"{client}/{reply.number} ends twice"
                entry.failed = reply
            elif isinstance(reply, Outputs):
                self._take_outputs(client, reply)

    def _take_outputs(self, client: int, reply: Outputs) -> None:
        stop_tokens = dict(reply.stop_tokens)
        for row, (number, position, tokens, finish) in enumerate(unpack(reply)):
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


class PagedExecutor:
    """Fake tokens computed from what the blocks hold. `poison`: a request with this id among its tokens fails.

    Each slot holds the checksum of the whole prefix up to its token; -1 marks what no step has written.
    """

    def __init__(self, config: EngineConfig, poison: int | None = None) -> None:
        assert config.num_blocks_override is not None
        self.info = FakeExecutor(config).info
        self.plans: list[bytes] = []
        self.in_flight: list[tuple[int, set[int]]] = []  # (step, blocks that it touches)
        self._poison = poison
        self._block_size = config.block_size
        self._kv = np.zeros(config.num_blocks_override * config.block_size, np.uint64)
        self._host = np.zeros((config.num_swap_blocks or 0, config.block_size), np.uint64)
        self.table = RunnerTable(config.max_num_seqs, config.block_size)
        self.seed = np.zeros(config.max_num_seqs, np.uint64)

    def determine_num_available_blocks(self, memory_bytes: int, block_size: int) -> int:
        raise AssertionError("the config of these tests is resolved")

    def initialize_cache(self, config: EngineConfig) -> None:
        raise AssertionError("the config of these tests is resolved")

    def prepare_ahead(self) -> bool:
        raise AssertionError("nobody is idle here")

    def close(self) -> None:
        """Nothing is held."""

    def execute(self, plan: SchedulerOutput) -> "_Handle":
        assert not plan.is_empty
        self.plans.append(encode_plan(plan))
        self._check_new_blocks(plan)
        table = self.table
        table.apply(plan)
        for new in plan.added:
            self.seed[new.row] = choice_seed(new.seed, new.choice) if new.params.temperature > 0 else 0
        self._copy_blocks(plan)
        starts = table.num_computed_tokens[plan.rows]
        samples = table.advance(plan)
        rows = plan.rows.tolist()
        if len(plan.num_draft_tokens):
            table.write_drafts(plan.rows, plan.draft_token_ids, plan.num_draft_tokens.astype(np.int64))
        counts = plan.num_scheduled_tokens.tolist()
        for row, start, count in zip(
            rows, starts.tolist(), counts, strict=True
        ):  # all is stored before anything is read
            end = start + count
            self._kv[self._slots(row, start, end)] = self._prefix_sums(row, end)[start:]
        self.in_flight.append((plan.step, {block for row in rows for block in self._blocks(row)}))
        return _Handle(self, self.sample(plan, samples))

    def sample(self, plan: SchedulerOutput, samples: npt.NDArray[np.bool_]) -> ModelRunnerOutput:
        """The step's result; its tokens are in the table then."""
        if len(plan.num_draft_tokens):
            return self._verified(plan, samples)
        pairs = zip(plan.rows.tolist(), samples, strict=True)
        token_ids = np.array([self.token(row) if sampled else NO_TOKEN for row, sampled in pairs], np.int32)
        # A failed row gets an id too: the next step may be planned already.
        self.table.append_tokens(plan.rows[samples], np.maximum(token_ids[samples], 0))
        return ModelRunnerOutput(plan.step, token_ids)

    def _verified(self, plan: SchedulerOutput, samples: npt.NDArray[np.bool_]) -> ModelRunnerOutput:
        """A token after the known ones of each row, and after each draft that is the token in its place."""
        runs = [
            self._run_of_drafts(row, count) if sampled else []
            for row, count, sampled in zip(plan.rows.tolist(), plan.num_draft_tokens.tolist(), samples, strict=True)
        ]
        token_ids = np.array([token for run in runs for token in run], np.int32)
        counts = np.array([len(run) for run in runs], np.int32)
        going = counts > 0
        self.table.append_tokens(plan.rows[going], np.maximum(token_ids, 0), counts[going].astype(np.int64))
        self.table.accept(plan, counts)
        return ModelRunnerOutput(plan.step, token_ids, counts=counts)

    def _run_of_drafts(self, row: int, count: int) -> list[int]:
        known, run = int(self.table.num_computed_tokens[row]), list[int]()
        drafts = self.table.tokens.read(row, known, known + count).tolist()
        while len(run) <= count:
            token = self.token(row, known + len(run))
            if token == FAILED_TOKEN and run:
                break  # behind a draft: the next step finds it again
            run.append(token)
            if run != drafts[: len(run)]:
                break
        return run

    def _copy_blocks(self, plan: SchedulerOutput) -> None:
        """Out of the cache, then back into it; token() sees what was copied wrongly or too late."""
        blocks = self._kv.reshape(-1, self._block_size)
        for targets in (plan.swapped_out_slots, plan.swapped_in_blocks):
            assert len(set(targets.tolist())) == len(targets), f"plan {plan.step} copies twice to one of {targets}"
        self._host[plan.swapped_out_slots] = blocks[plan.swapped_out_blocks]
        blocks[plan.swapped_in_blocks] = self._host[plan.swapped_in_slots]

    def _check_new_blocks(self, plan: SchedulerOutput) -> None:
        """Blocks that this plan begins to fill are touched by no step in flight."""
        fresh = set(plan.block_ids.tolist())
        for new in plan.added:
            fresh |= set(new.block_ids[new.num_computed_tokens // self._block_size :].tolist())
        for step, blocks in self.in_flight:
            assert not fresh & blocks, f"plan {plan.step} reuses blocks {fresh & blocks} of step {step} in flight"

    def token(self, row: int, end: int | None = None) -> int:
        """Next token of the row after `end` tokens, all computed ones, after its whole context has been read back."""
        end = int(self.table.num_computed_tokens[row]) if end is None else end
        sums = self._prefix_sums(row, end)
        found = self._kv[self._slots(row, 0, end)]
        wrong = np.flatnonzero(found != sums)
        assert not len(wrong), f"row {row}: foreign content at positions {wrong[:8]}"
        if self._poison is not None and self._poison in self.table.tokens.read(row, 0, end):
            return FAILED_TOKEN
        position = np.array([end], np.uint64)
        return int(next_token(found[-1:], position, self.seed[row : row + 1], self.info.vocab_size)[0])

    def _prefix_sums(self, row: int, end: int) -> UInt64s:
        ids = self.table.tokens.read(row, 0, end)
        positions = np.arange(1, end + 1, dtype=np.uint64)
        golden = np.uint64(0x9E3779B97F4A7C15)
        return np.cumsum(mix((ids.astype(np.uint64) + np.uint64(1)) * golden + mix(positions)))

    def _blocks(self, row: int) -> list[int]:
        blocks: list[int] = self.table.blocks.read(row, 0, int(self.table.num_blocks[row])).tolist()
        return blocks

    def _slots(self, row: int, start: int, end: int) -> npt.NDArray[np.int64]:
        positions = np.arange(start, end)
        blocks = np.array(self._blocks(row), np.int64)[positions // self._block_size]
        return blocks * self._block_size + positions % self._block_size


class _Handle:
    def __init__(self, executor: PagedExecutor, output: ModelRunnerOutput) -> None:
        self._executor = executor
        self._output = output

    def result(self) -> ModelRunnerOutput:
        step, _ = self._executor.in_flight.pop(0)
        assert step == self._output.step, f"asked for step {self._output.step} while {step} is the oldest"
        return self._output


class Driver:
    """An EngineCore over a PagedExecutor with its clients; every step is followed by check_integrity()."""

    def __init__(
        self, config: EngineConfig, poison: int | None = None, executor: type[PagedExecutor] = PagedExecutor
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

    def __init__(self, config: EngineConfig) -> None:
        self.scheduler = Scheduler(config, (EOS,))
        self.inbox = Inbox()
        self.mirror = RunnerTable(config.max_num_seqs, config.block_size)
        self._max_model_len = config.max_model_len or 0
        self._serial = 0
        self._samples: dict[int, npt.NDArray[np.bool_]] = {}

    def add(self, message: AddRequest, client: int = 0, deadline_ns: int = 0, now_ns: int = 0) -> Received:
        entry = self.inbox.expect(client, message)
        request = request_from_message(message, client, self._serial, self._max_model_len)
        self._serial += 1
        self.scheduler.add_request([request], now_ns, deadline_ns)
        return entry

    def schedule(self, now_ns: int = 0) -> SchedulerOutput:
        plan = self.scheduler.schedule(now_ns)
        self.scheduler.check_integrity()
        if not plan.is_empty:
            self.mirror.apply(plan)
            self._samples[plan.step] = self.mirror.advance(plan)
            rows = plan.rows[self._samples[plan.step]]
            self.mirror.append_tokens(rows, np.zeros(len(rows), np.int32))  # lengths matter, ids do not
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
