"""A workload through the real engine core and the fake executor, under a virtual clock."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from core.engine import EngineCore
from core.execution.executor import Costs, StepCosts, StepHandle
from core.execution.plan import SchedulerOutput
from core.executors.fake import create
from core.scheduling.interface import SchedulerInterface
from core.scheduling.stats import SchedulerStats
from ipc.options.resolved import ResolvedConfig
from ipc.tables.arrays import Ints
from ipc.wire.messages import Outputs
from tools.lab.traces.workload import TimedRequest

_NEVER = -1
_PAUSE_NS = 1_000_000  # from a step with nothing to run to the next step
_MAX_PAUSES = 100_000  # consecutive ones, after which the engine counts as stuck


class StepTime(NamedTuple):
    """The duration of a step.

    It is fixed + token * tokens computed + context * tokens of KV cache read + copy * blocks copied.
    """

    fixed_ns: int
    token_ns: int
    context_ns: float
    copy_ns: int  # to or from the host

    def of(self, plan: SchedulerOutput, num_context_tokens: int) -> int:
        """Return the duration of this plan's step in ns. num_context_tokens: tokens of KV cache read."""
        num_copies = len(plan.swapped_out_blocks) + len(plan.swapped_in_blocks)
        linear = self.fixed_ns + self.token_ns * plan.num_tokens + self.copy_ns * num_copies
        return linear + round(self.context_ns * num_context_tokens)


class Observed(NamedTuple):
    """Columns with one entry for each request, in virtual ns; -1 for an event that never happened."""

    arrivals: Ints
    scheduled: Ints  # start of the step in which it first ran
    first_tokens: Ints
    last_tokens: Ints
    num_tokens: Ints
    finished: Ints  # 1 if the request ended, otherwise 0
    end_ns: int  # of the last step
    stats: SchedulerStats


class TimedExecutor:
    """The fake executor, with the duration of the last step."""

    def __init__(self, config: ResolvedConfig, step_time: StepTime) -> None:
        self._inner = create(config)
        self._inner.initialize_cache(config)
        self._step_time = step_time
        self.info, self.grammars, self.adapters = self._inner.info, self._inner.grammars, self._inner.adapters
        self.scheduler: SchedulerInterface | None = None
        self.duration_ns = 0

    def determine_num_available_blocks(self, memory_bytes: int, block_size: int) -> int:
        """Return the fake executor's number."""
        return self._inner.determine_num_available_blocks(memory_bytes, block_size)

    def cache_memory_bytes(self) -> int | None:
        """Return the fake executor's answer: there is no device."""
        return self._inner.cache_memory_bytes()

    def initialize_cache(self, config: ResolvedConfig) -> None:
        """Do nothing: the constructor did it."""

    def measure_steps(self) -> StepCosts:
        """Return the fake executor's made-up durations."""
        return self._inner.measure_steps()

    def warm_up(self) -> int:
        """Return the fake executor's made-up duration."""
        return self._inner.warm_up()

    def measure_costs(self) -> Costs:
        """Return the fake executor's made-up costs."""
        return self._inner.measure_costs()

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Run one step, and note its duration."""
        assert self.scheduler is not None, "no scheduler to ask for the rows' lengths"
        context = int(self.scheduler.table.num_computed_tokens[plan.rows].sum())
        self.duration_ns = self._step_time.of(plan, context)
        return self._inner.execute(plan)

    def prepare_ahead(self) -> bool:
        """Do what the fake executor does."""
        return self._inner.prepare_ahead()

    def close(self) -> None:
        """Close the fake executor."""
        self._inner.close()


def simulate(config: ResolvedConfig, requests: list[TimedRequest], step_time: StepTime) -> Observed:
    """Run the requests until all have ended or none makes progress.

    requests: in order of arrival.
    """
    executor = TimedExecutor(config, step_time)
    engine = EngineCore(config, executor)
    executor.scheduler = engine.scheduler
    observer = Observer([request.arrival_ns for request in requests])
    now_ns = next_request = num_pauses = 0
    while (next_request < len(requests) or engine.has_work) and num_pauses < _MAX_PAUSES:
        if not engine.has_work:
            now_ns = max(now_ns, requests[next_request].arrival_ns)
        inbox = []
        while next_request < len(requests) and requests[next_request].arrival_ns <= now_ns:
            inbox.append((requests[next_request].client, requests[next_request].message))
            next_request += 1
        executor.duration_ns = 0
        replies = engine.step(inbox, now_ns)
        num_pauses = 0 if executor.duration_ns else num_pauses + 1
        end_ns = now_ns + (executor.duration_ns or _PAUSE_NS)
        observer.take(replies, now_ns, end_ns)
        now_ns = end_ns
    return observer.observed(now_ns, engine.scheduler.stats)


class Observer:
    """Fills the columns of Observed."""

    def __init__(self, arrivals_ns: list[int]) -> None:
        count = len(arrivals_ns)
        self._arrivals = np.array(arrivals_ns, np.int64)
        self._scheduled, self._first, self._last = (np.full(count, _NEVER, np.int64) for _ in range(3))
        self._counts, self._finished = (np.zeros(count, np.int64) for _ in range(2))

    def take(self, replies: Sequence[tuple[int, object]], begin_ns: int, end_ns: int) -> None:
        """Enter the replies of a step that ran from begin_ns to end_ns.

        A request that is refused never finishes, and counts as unfinished.
        """
        for _, reply in replies:
            if not isinstance(reply, Outputs):
                continue
            if reply.started:
                self._scheduled[np.frombuffer(reply.started, "<u4")[::2]] = begin_ns
            numbers = np.frombuffer(reply.numbers, "<u4")
            counts = np.frombuffer(reply.counts, "<u2")
            reported = numbers[counts > 0]
            self._first[reported[self._counts[reported] == 0]] = end_ns
            self._last[reported] = end_ns
            self._counts[reported] += counts[counts > 0]
            if reply.finish:
                self._finished[numbers[np.frombuffer(reply.finish, "u1") > 0]] = 1

    def observed(self, end_ns: int, stats: SchedulerStats) -> Observed:
        """Return the columns. end_ns: of the last step. stats: the engine's."""
        return Observed(
            arrivals=self._arrivals,
            scheduled=self._scheduled,
            first_tokens=self._first,
            last_tokens=self._last,
            num_tokens=self._counts,
            finished=self._finished,
            end_ns=end_ns,
            stats=stats,
        )
