"""A fleet of engines in virtual time: one heap of events by time."""

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from core.engine import EngineCore
from core.execution.executor import ModelInfo, StepHandle
from core.execution.plan import NO_TOKEN, ModelRunnerOutput, SchedulerOutput
from core.executors.fake import FakeExecutor
from core.inputs import EngineInput, EngineReply
from frontend.fleet.placement import Placement
from frontend.fleet.prefix_index import PrefixIndex
from frontend.fleet.replicas import Replicas
from ipc.options.resolved import ResolvedConfig
from ipc.options.schedulers import BUILT_IN_SCHEDULER
from ipc.tables.arrays import Ints
from ipc.wire.block_roots import root_of_message
from ipc.wire.kv_events import KVEvent
from ipc.wire.messages import AddRequest, Outputs, RequestFailed
from ipc.wire.scheduling_messages import FollowKVEvents, KVEvents
from tools.commands.replay.latency import Times
from tools.commands.replay.what_if.step_time import FEATURES, StepTime
from tools.lab.traces.workload import TimedRequest

# Replica: one engine of a simulated fleet: the real scheduler under a virtual clock, with made-up tokens.
#
# While nothing waits and every row decodes, the next steps are known: each gives each row one token. The same holds if
# requests wait in order of arrival and all rows are taken: none starts before the first row ends. Then several steps
# are one call of the engine, in which the executor returns several tokens of each row. Their number is decided by the
# next event: a request arrives, or the first row ends. The clock counts each step, and an arriving request is taken in
# at the next boundary between two of them.


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
        self._time, self._joins = time, joins_steps and config.scheduler_cls == BUILT_IN_SCHEDULER
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
        rows, table = scheduler.batch.rows, scheduler.table
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


_NEVER = -1
_ROUTER = -1  # the router's client number at each replica that it follows
_BY_PREFIX = "prefix"
_NS = 1e-9
_MAX_IDLE_CALLS = 100_000  # consecutive steps of all replicas in which nothing ends: then the fleet is stuck


class FleetRun(NamedTuple):
    """What a simulated fleet did. Columns have one entry for each request, in virtual ns; -1: it never happened."""

    arrivals: Ints
    first_tokens: Ints
    last_tokens: Ints
    num_tokens: Ints
    ends: Ints
    replicas: Ints  # that each request ran on
    num_calls: int  # of the engines
    num_preemptions: int
    num_cached_tokens: int
    end_ns: int

    def times(self) -> list[Times]:
        """Return the times of the requests in seconds."""
        columns = (self.arrivals, self.first_tokens, self.last_tokens, self.ends, self.num_tokens)
        return [
            Times(arrival * _NS, _seconds(first), _seconds(last), _seconds(end), count)
            for arrival, first, last, end, count in zip(*(one.tolist() for one in columns), strict=True)
        ]


def simulate_fleet(
    config: ResolvedConfig,
    info: ModelInfo,
    requests: Sequence[TimedRequest],
    time: StepTime,
    *,
    num_replicas: int,
    route: str = "least_loaded",
    joins_steps: bool = True,
) -> FleetRun:
    """Run the requests, in order of arrival, until all have ended or none makes progress.

    config: of each replica. route: one of POLICIES in
    frontend/fleet/placement.py. joins_steps: see tools/lab/simulate/fleet.py.
    """
    replicas = [Replica(config, info, time, joins_steps=joins_steps) for _ in range(num_replicas)]
    fleet = _Fleet(replicas, requests, route)
    fleet.run()
    return fleet.result()


class _News(NamedTuple):
    """What the router learns about a replica, ordered by time."""

    ns: int
    serial: int
    row: int  # of the replica
    num_queued: int = 0  # tokens of requests whose first token has arrived
    num_ended: int = 0  # requests
    events: Sequence[KVEvent] = ()


class _Fleet:
    def __init__(self, replicas: list[Replica], requests: Sequence[TimedRequest], route: str) -> None:
        count = len(requests)
        self._replicas, self._requests = replicas, requests
        self._table, self._index = Replicas(), PrefixIndex()
        for number, replica in enumerate(replicas):
            row = self._table.add(f"{number}").row  # which may replace the columns
            self._table.is_open[row] = True
            if route == _BY_PREFIX:
                replica.follow(_ROUTER)
        self._placement = Placement(self._table, route, 0)
        self._arrivals = np.array([one.arrival_ns for one in requests], np.int64)
        self._first, self._last, self._ends = (np.full(count, _NEVER, np.int64) for _ in range(3))
        self._counts, self._missing = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._of = np.full(count, _NEVER, np.int64)
        self._due: list[tuple[int, int]] = []  # (ns, replica), a heap; outdated entries stay in it
        self._news: list[_News] = []  # a heap of news for the router
        self._num_news = self._end_ns = self._num_idle = 0

    def run(self) -> None:
        """Process the events in order."""
        for number, request in enumerate(self._requests):
            self._run_until(request.arrival_ns)
            self._learn(request.arrival_ns)
            index = self._place(number, request.message)
            self._note(index, self._replicas[index].submit(request.client, request.message, request.arrival_ns))
            self._push(index)
        self._run_until(None)

    def result(self) -> FleetRun:
        """Return the results."""
        stats = [one.stats for one in self._replicas]
        calls = sum(one.num_calls for one in self._replicas)
        return FleetRun(
            arrivals=self._arrivals,
            first_tokens=self._first,
            last_tokens=self._last,
            num_tokens=self._counts,
            ends=self._ends,
            replicas=self._of,
            num_calls=calls,
            num_preemptions=sum(one[0] for one in stats),
            num_cached_tokens=sum(one[1] for one in stats),
            end_ns=self._end_ns,
        )

    def _place(self, number: int, message: AddRequest) -> int:
        """Choose the replica of a request, as frontend/fleet/dispatch.py does, and count the request there."""
        tokens, table = message.prompt_token_ids, self._table
        matches = self._index.match(root_of_message(message), tokens) if self._placement.needs_matches else {}
        index = self._placement.choose(matches, len(tokens) // 4)
        self._of[number] = index
        self._missing[number] = missing = max(1, len(tokens) // 4 - matches.get(index, 0))
        table.queued[index] += missing
        table.given[index] += missing
        table.live[index] += 1
        return index

    def _run_until(self, now_ns: int | None) -> None:
        """Run what is due before now_ns; None: everything."""
        while self._due and (now_ns is None or self._due[0][0] < now_ns) and self._num_idle < _MAX_IDLE_CALLS:
            due_ns, index = heapq.heappop(self._due)
            replica = self._replicas[index]
            if not replica.has_work or replica.due_ns != due_ns:
                continue  # a newer entry has replaced this one
            self._num_idle += 1
            self._note(index, replica.run_until(due_ns))
            self._push(index)

    def _learn(self, now_ns: int) -> None:
        """Give the router all news up to now."""
        table = self._table
        while self._news and self._news[0].ns <= now_ns:
            news = heapq.heappop(self._news)
            table.queued[news.row] -= news.num_queued
            table.live[news.row] -= news.num_ended
            if news.events:
                self._index.apply(news.row, news.events)

    def _tell(self, ns: int, row: int, **what: Any) -> None:
        self._num_news += 1
        heapq.heappush(self._news, _News(ns, self._num_news, row, **what))

    def _push(self, index: int) -> None:
        if self._replicas[index].has_work:
            heapq.heappush(self._due, (self._replicas[index].due_ns, index))

    def _note(self, index: int, said: Sequence[Said]) -> None:
        for client, reply, end_ns, _ in said:
            if client == _ROUTER:
                if isinstance(reply, KVEvents):
                    self._tell(end_ns, index, events=reply.events)
            elif isinstance(reply, RequestFailed):
                self._end(index, np.array([reply.number]), end_ns)
            elif isinstance(reply, Outputs):
                self._note_outputs(index, reply, end_ns)

    def _note_outputs(self, index: int, outputs: Outputs, end_ns: int) -> None:
        numbers, counts = np.frombuffer(outputs.numbers, "<u4"), np.frombuffer(outputs.counts, "<u2")
        yielding = numbers[counts > 0]
        beginning = yielding[self._counts[yielding] == 0]
        self._first[beginning] = end_ns
        self._last[yielding] = end_ns
        self._counts[yielding] += counts[counts > 0]
        if len(beginning):
            self._tell(end_ns, index, num_queued=int(self._missing[beginning].sum()))
            self._missing[beginning] = 0
        if outputs.finish:
            self._end(index, numbers[np.frombuffer(outputs.finish, "u1") > 0], end_ns)

    def _end(self, index: int, numbers: Ints, end_ns: int) -> None:
        self._ends[numbers] = end_ns
        self._tell(end_ns, index, num_ended=len(numbers), num_queued=int(self._missing[numbers].sum()))
        self._missing[numbers] = 0
        self._end_ns, self._num_idle = max(self._end_ns, end_ns), 0


def _seconds(ns: int) -> float | None:
    return None if ns == _NEVER else ns * _NS
