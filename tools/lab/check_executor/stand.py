"""Stand: one executor under the real engine core, in this process, with a clock of its own."""

from typing import NamedTuple

import numpy as np

from core.engine import EngineCore
from core.execution.executor import Executor, ModelInfo
from core.executors.by_name import load_executor
from core.inputs import EngineReply
from core.process.resolve import BlocksIn, resolve, resolve_costs
from ipc.machine.cpus import usable_cpus
from ipc.machine.memory import usable_memory_bytes
from ipc.options.config import EngineConfig
from ipc.wire.messages import Abort, AddRequest, FinishReason, Outputs, RequestFailed, Statistics
from tools.lab.check_executor.requests import Plan
from tools.lab.check_executor.watch import BrokenContractError, OutputWatch

_CLIENT = 1
_STEP_NS = 1_000_000
_MAX_IDLE_STEPS = 200  # in a row without a token, after which the executor counts as stuck


class Answer(NamedTuple):
    """All that a request got. values: its log probabilities in order of position, as bytes of float32."""

    token_ids: tuple[int, ...]
    values: bytes
    failure: str = ""  # of a request that failed


class Stand:
    """An executor with an EngineCore of its own, until close()."""

    def __init__(self, config: EngineConfig) -> None:
        """Create the executor and its cache. Errors: those of the executor."""
        self._executor: Executor = load_executor(config)
        self.info: ModelInfo = self._executor.info
        self.blocks_in: BlocksIn = self._executor.determine_num_available_blocks
        resolved = resolve(
            config,
            self.info,
            self.blocks_in,
            total_memory_bytes=usable_memory_bytes(),
            num_cpus=usable_cpus(),
            device_bytes=None if config.kv_cache_memory_bytes else self._executor.cache_memory_bytes(),
        )
        self._executor.initialize_cache(resolved)
        self.config = resolve_costs(resolved, config, self._executor.measure_costs, self._executor.measure_steps)
        self._engine = EngineCore(self.config, self._executor, 0, [OutputWatch(self.info)])
        self._num_sent = 0
        self._now_ns = 0
        self._tokens: dict[int, list[int]] = {}
        self._values: dict[int, dict[int, bytes]] = {}  # by position in the request's tokens
        self._failures: dict[int, str] = {}
        self._live: set[int] = set()

    def close(self) -> None:
        """Release the executor."""
        self._executor.close()

    @property
    def statistics(self) -> Statistics:
        """Return the engine's counters."""
        return self._engine.statistics(0)

    def ask(
        self, plans: list[Plan], per_step: int | None = None, aborted: frozenset[int] = frozenset()
    ) -> list[Answer]:
        """Send the requests, `per_step` of them before each step (None: all at once), and return their answers.

        aborted: indices of requests that are aborted as soon as they have a token. Errors: BrokenContractError.
        """
        first, waiting = self._num_sent, list(enumerate(plans, self._num_sent))
        self._num_sent += len(plans)
        num_idle = 0
        while waiting or self._engine.has_work:
            inbox: list[tuple[int, AddRequest | Abort]] = []
            for number, plan in waiting[:per_step]:
                inbox.append((_CLIENT, plan.message(number)))
                self._live.add(number)
            waiting = waiting[per_step:] if per_step is not None else []
            ending = [
                first + index for index in aborted if first + index in self._live and self._tokens.get(first + index)
            ]
            if ending:
                inbox.append((_CLIENT, Abort(np.array(ending, "<u4").tobytes())))
            num_idle = 0 if self._step(inbox) or inbox else num_idle + 1
            if num_idle > _MAX_IDLE_STEPS:
                raise BrokenContractError(f"{len(self._live)} requests got no token in {_MAX_IDLE_STEPS} steps")
        return [self._answer(number) for number in range(first, self._num_sent)]

    def _step(self, inbox: list[tuple[int, AddRequest | Abort]]) -> bool:
        """Run one step and check the scheduler's state after it; return whether any token arrived."""
        self._now_ns += _STEP_NS
        replies = self._engine.step(inbox, self._now_ns)
        try:
            self._engine.scheduler.check_integrity()
        except AssertionError as error:
            raise BrokenContractError(f"the scheduler's state no longer fits the outputs: {error}") from error
        num_tokens = sum(self._take(reply) for _, reply in replies)
        return num_tokens > 0

    def _take(self, reply: EngineReply) -> int:
        """Note the results of the requests, and return the number of tokens."""
        if isinstance(reply, RequestFailed):
            self._failures[reply.number] = reply.message
            self._live.discard(reply.number)
        if not isinstance(reply, Outputs):
            return 0
        numbers = np.frombuffer(reply.numbers, "<u4").tolist()
        counts = np.frombuffer(reply.counts, "<u2").tolist()
        tokens, first = np.frombuffer(reply.tokens, "<i4").tolist(), 0
        finish = reply.finish or bytes(len(numbers))
        for number, count, reason in zip(numbers, counts, finish, strict=True):
            self._tokens.setdefault(number, []).extend(tokens[first : first + count])
            first += count
            if reason:
                self._live.discard(number)
                if reason == FinishReason.ABORT:
                    self._failures[number] = "aborted"
        if reply.logprobs is not None:
            self._take_logprobs(reply)
        return len(tokens)

    def _take_logprobs(self, reply: Outputs) -> None:
        columns = reply.logprobs
        assert columns is not None, reply
        packed = columns.numbers, columns.positions, columns.counts
        first = 0
        for number, position, count in zip(*(np.frombuffer(each, "<u4").tolist() for each in packed), strict=True):
            self._values.setdefault(number, {})[position] = columns.values[4 * first : 4 * (first + count)]
            first += count

    def _answer(self, number: int) -> Answer:
        values = b"".join(value for _, value in sorted(self._values.pop(number, {}).items()))
        return Answer(tuple(self._tokens.pop(number, [])), values, self._failures.pop(number, ""))

    def num_held_blocks(self) -> int:
        """Return the number of KV blocks that some request still holds, without the null block."""
        pool = self._engine.scheduler.pool
        return pool.num_blocks - 1 - pool.num_free
