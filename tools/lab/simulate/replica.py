"""Replica: one engine of a simulated fleet: the real scheduler under a virtual clock, with made-up tokens.

While nothing waits and every row decodes, the next steps are known: each gives each row one token. The same holds if
requests wait in order of arrival and all rows are taken: none starts before the first row ends. Then several steps are
one call of the engine, in which the executor returns several tokens of each row. Their number is decided by the next
event: a request arrives, or the first row ends. The clock counts each step, and an arriving request is taken in at the
next boundary between two of them.
"""

import numpy as np

from core.engine import EngineCore
from core.execution.executor import ModelInfo, StepHandle
from core.execution.plan import NO_TOKEN, ModelRunnerOutput, SchedulerOutput
from core.executors.fake import FakeExecutor
from core.inputs import EngineInput, EngineReply
from ipc.options.resolved import ResolvedConfig
from ipc.tables.arrays import Ints
from ipc.wire.messages import AddRequest
from ipc.wire.scheduling_messages import FollowKVEvents
from tools.commands.replay.what_if.step_time import FEATURES, StepTime

_FILLER = 3  # every output token: with ignore_eos it does not end a request
_MOST_STEPS = 32  # in one call of the engine
_SHARE = 4  # the tokens of such a call take at most a quarter of the next one's budget
_ROWS, _KV, _SAMPLES = (FEATURES.index(name) for name in (FEATURES[1], FEATURES[3], FEATURES[6]))
_PAUSE_NS = 1_000_000  # from a step with nothing to run to the next one

#: (client, reply, ns at which its call ended, steps of the call)
Said = tuple[int, EngineReply, int, int]


class LengthExecutor(FakeExecutor):
    """An executor whose requests end by their length. num_steps: number of steps that the next call covers.

    features: of the last plan's first step, as in tools/commands/replay/what_if/step_time.py; None: nothing ran.
    """

    engine: EngineCore  # set once it exists

    def __init__(self, config: ResolvedConfig, info: ModelInfo) -> None:
        super().__init__(config)
        self.info = info
        self.num_steps = 1
        self.features: Ints | None = None
        self._num_before = 1  # steps of the last call: this many tokens of each row are still to be computed

    def initialize_cache(self, config: ResolvedConfig) -> None:
        """Do nothing: no mirror of the table is kept."""

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Return num_steps tokens of each row that has all of its tokens computed."""
        table, rows, steps = self.engine.scheduler.table, plan.rows, self.num_steps
        ends, counts = table.num_computed_tokens[rows], plan.num_scheduled_tokens.astype(np.int64)
        samples = ends >= table.num_tokens[rows]
        prompts = ends - counts < table.num_prompt_tokens[rows]
        prompts |= (counts > 1) & (counts != self._num_before)  # computed again after a preemption
        num_prompt = int(counts[prompts].sum())
        read = counts * (ends - counts) + counts * (counts + 1) // 2
        num_copies = len(plan.swapped_out_blocks) + len(plan.swapped_in_blocks)
        num_decoding, num_samples = len(rows) - int(prompts.sum()), int(samples.sum())
        kv = int(ends[~prompts].sum())
        parts = (
            1,
            num_decoding,
            num_prompt,
            kv,
            int(read[prompts].sum()),
            int(num_prompt > 0),
            num_samples,
            num_copies,
        )
        self.features, self._num_before = np.array(parts), steps
        if steps == 1:
            return _Done(ModelRunnerOutput(plan.step, np.where(samples, _FILLER, NO_TOKEN).astype(np.int32)))
        each = np.where(samples, steps, 0).astype(np.int32)
        return _Done(ModelRunnerOutput(plan.step, np.full(int(each.sum()), _FILLER, np.int32), counts=each))


class _Done:
    """A finished step."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def result(self) -> ModelRunnerOutput:
        return self._output


class Replica:
    """One engine. time: of its steps. joins_steps: see above."""

    def __init__(self, config: ResolvedConfig, info: ModelInfo, time: StepTime, *, joins_steps: bool = True) -> None:
        self._executor = LengthExecutor(config, info)
        self._engine = EngineCore(config, self._executor)
        self._executor.engine = self._engine
        self._time, self._joins = time, joins_steps
        self._budget = config.max_num_batched_tokens
        #: Rows that no waiting request can take from a running one; 0: the policy may preempt.
        self._safe_rows = config.max_num_seqs if config.scheduling_policy == "fcfs" else 0
        self._inbox: list[tuple[int, EngineInput]] = []
        self._most_steps, self._first_ns, self._more_ns = 1, 0.0, 0.0  # of the next call: see _look_ahead()
        self.now_ns = 0  # start of the next step
        self.num_calls = 0

    @property
    def has_work(self) -> bool:
        """Return whether a step would do anything."""
        return bool(self._inbox) or self._engine.has_work

    @property
    def due_ns(self) -> int:
        """Return the time up to which run_until() must run it next: its steps' end."""
        return self.now_ns + (self._span_ns(self._most_steps) if self._most_steps > 1 else 1)

    @property
    def stats(self) -> tuple[int, int]:
        """Return preemptions, and prompt tokens found in the prefix cache."""
        stats = self._engine.scheduler.stats
        return stats.num_preemptions, stats.prefix_cache_hits

    def follow(self, client: int) -> None:
        """Send a client what the prefix cache stores and removes, from the first step on."""
        self._inbox.append((client, FollowKVEvents(0)))

    def submit(self, client: int, message: AddRequest, now_ns: int) -> list[Said]:
        """Take in a request that arrives now, after the steps that begin earlier; return their replies."""
        said = self.run_until(now_ns)
        if not self.has_work:
            self.now_ns = max(self.now_ns, now_ns)
        self._inbox.append((client, message))
        self._most_steps = 1
        return said

    def run_until(self, now_ns: int) -> list[Said]:
        """Run the steps that begin before now_ns, and return their replies."""
        said: list[Said] = []
        while self.has_work and self.now_ns < now_ns:
            count = self._num_steps_until(now_ns)
            said += [(*reply, self.now_ns, count) for reply in self._call(count)]
        return said

    def _num_steps_until(self, now_ns: int) -> int:
        count = 1
        while count < self._most_steps and self.now_ns + self._span_ns(count) < now_ns:
            count += 1
        return count

    def _span_ns(self, count: int) -> int:
        return round(count * self._first_ns + self._more_ns * count * (count - 1) / 2)

    def _call(self, count: int) -> list[tuple[int, EngineReply]]:
        inbox, self._inbox = self._inbox, []
        executor = self._executor
        executor.num_steps, executor.features = count, None
        self.num_calls += 1
        replies = self._engine.step(inbox, self.now_ns)
        if executor.features is None:
            self.now_ns += _PAUSE_NS
        else:
            more = float(self._time.weights[_KV]) * int(executor.features[_ROWS]) * count * (count - 1) / 2
            self.now_ns += max(1, round(count * self._time.of(executor.features) + more))
        self._look_ahead()
        return replies

    def _look_ahead(self) -> None:
        """Set how many steps the next call may cover, the ns of the first, and the ns added by each later one."""
        scheduler, self._most_steps = self._engine.scheduler, 1
        rows, table = scheduler.running, scheduler.table
        if not self._joins or not len(rows):
            return
        if len(scheduler.waiting) and len(rows) != self._safe_rows:
            return
        lengths = table.num_tokens[rows]
        left = int((table.max_total_tokens[rows] - lengths).min())
        if left < 2 or (table.num_computed_tokens[rows] < table.num_prompt_tokens[rows]).any():
            return
        weights = self._time.weights
        of_rows = float(weights[_ROWS] + weights[_SAMPLES]) * len(rows)
        self._first_ns = float(weights[0]) + of_rows + float(weights[_KV]) * int(lengths.sum())
        self._more_ns = float(weights[_KV]) * len(rows)
        self._most_steps = max(1, min(_MOST_STEPS, left, self._budget // (_SHARE * len(rows))))
