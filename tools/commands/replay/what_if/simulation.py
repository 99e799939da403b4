"""Simulation: a recording's requests through the real scheduler, under a virtual clock and with other options."""

import heapq
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from core.engine import EngineCore
from core.execution.executor import ModelInfo
from core.inputs import EngineInput, EngineReply
from core.kv.block_names import block_keys, hash_blocks
from core.scheduling.policies import Policy
from core.scheduling.scheduler import Scheduler
from ipc.errors import CaptureFileError
from ipc.log_lines import counted
from ipc.options.resolved import ResolvedConfig
from ipc.options.schedulers import BUILT_IN_SCHEDULER
from ipc.options.workers import most_in_flight
from ipc.tables.arrays import NO_INTS, Doubles, Ints
from ipc.wire.messages import Abort, Outputs, RequestFailed
from ipc.wire.metrics_messages import step_token_bucket
from tools.commands.replay.what_if.oracle_executor import OracleExecutor
from tools.commands.replay.what_if.recording import Recorded, Recording, RequestKey
from tools.commands.replay.what_if.step_time import FeatureWatcher, Pace, StepTime, decoding_features

# JoinedSteps: decoding steps with the same decisions, simulated as one.
#
# If every row decodes, no row ends and none can start, the next steps differ only in the blocks that rows get and name,
# and these are known in advance. So the table, the pool and the counters are set to the state that as many calls of
# EngineCore.step() would produce; a test compares both. Only the scheduler's step number is not counted.


class JoinedSteps:
    """The steps of one simulated engine. config: its own. Requests have one choice each, sample, and have no deadline.

    count: how many of the next steps make the same decisions, found by look(); rows [R]: the rows that get a token in
    each.
    """

    def __init__(self, config: ResolvedConfig, engine: EngineCore, executor: OracleExecutor) -> None:
        self._scheduler, self._executor = engine.scheduler, executor
        ours = engine.scheduler if config.scheduler_cls == BUILT_IN_SCHEDULER else None
        self._policy: Policy | None = None  # None: its steps are never joined
        if isinstance(ours, Scheduler) and _may_join(config, executor) and not ours.cuts:
            self._policy = ours.policy
        self._size = config.block_size
        self._most_rows = config.max_num_seqs
        self._budget = config.max_num_batched_tokens
        self.count = 0
        self.rows: Ints = NO_INTS
        self._grows: Ints = NO_INTS  # [R] step, from 0, in which each row gets a block; past the last if none
        self._fills: Ints = NO_INTS  # [R] the step in which it computes the last token of its block

    def look(self, most: int) -> int:
        """Find count, at most this; it is 0 if the next step may do anything except give each row one token."""
        self.count = 0
        scheduler, batch = self._scheduler, self._scheduler.batch
        self.rows = rows = batch.rows
        if self._policy is None or not 0 < len(rows) < self._budget:
            return 0
        table, pool = scheduler.table, scheduler.pool
        lengths, num_prompt = table.num_tokens[rows], table.num_prompt_tokens[rows]
        positions = lengths - num_prompt
        ends = self._executor.next_end(rows, positions, table.max_total_tokens[rows] - num_prompt)
        count = min(int((ends - positions).min()) - 1, most)
        if (
            count < 2
            or np.count_nonzero(lengths - table.num_computed_tokens[rows] != 1)
            or not self._starts_nothing(self._policy)
        ):
            return 0
        count = min(count, self._size)
        self._grows = table.num_blocks[rows] * self._size - lengths + 1
        growing = np.sort(self._grows[self._grows < count])
        if len(growing) > pool.num_free:
            count = int(growing[pool.num_free])
            growing = growing[: pool.num_free]
        if scheduler.batch.prefix_cache.is_enabled:
            self._fills = (table.num_named_blocks[rows] + 1) * self._size - lengths
            if int(self._fills.min()) < 0 or self._evicts_what_it_names(len(growing), count):
                return 0
        self.count = count
        return count

    def num_read(self) -> int:
        """Return the KV tokens that the first of the steps reads; each later one reads len(rows) more."""
        return int(self._scheduler.table.num_tokens[self.rows].sum())

    def take(self, count: int) -> None:
        """Simulate this many of the steps: at most self.count."""
        scheduler, rows = self._scheduler, self.rows
        table, batch, stats = scheduler.table, scheduler.batch, scheduler.stats
        lengths = table.num_tokens[rows]
        owners, places = rows.repeat(count), (lengths[:, None] + np.arange(count)).ravel()
        positions = places - table.num_prompt_tokens[owners]
        table.tokens.ensure(rows, lengths + count)
        table.tokens.set(owners, places, self._executor.tokens_at(owners, positions))
        self._executor.count_made_up(owners, positions)
        if len(growing := _in_turn(self._grows, count)):
            taking = rows[growing]
            table.append_blocks(taking, np.ones(len(taking), np.int64), scheduler.pool.allocate(len(taking)))
        table.num_tokens[rows] = lengths + count
        table.num_computed_tokens[rows] = lengths + count - 1
        if batch.prefix_cache.is_enabled and len(filling := _in_turn(self._fills, count)):
            naming = rows[filling]
            batch.prefix_cache.name_full_blocks(naming, table.num_computed_tokens[naming])
        num_rows, pool = len(rows), scheduler.pool
        stats.num_steps += count
        stats.num_scheduled_tokens += count * num_rows
        stats.num_generation_tokens += count * num_rows
        stats.step_tokens[step_token_bucket(num_rows)] += count
        stats.num_scheduled_rows += count * num_rows
        stats.max_scheduled_rows = max(stats.max_scheduled_rows, num_rows)
        stats.max_used_blocks = max(stats.max_used_blocks, pool.num_blocks - 1 - pool.num_free - pool.num_fenced)
        if scheduler.waiting.peek() is not None:
            stats.num_head_no_row += count

    def _starts_nothing(self, policy: Policy) -> bool:
        """Return whether no waiting request could start or preempt another one as long as no row ends."""
        first = self._scheduler.waiting.peek()
        if first is None:
            return True
        rows = self.rows
        return len(rows) == self._most_rows and not policy.must_yield(first, rows).any()

    def _evicts_what_it_names(self, num_blocks: int, count: int) -> bool:
        """Return whether the steps may evict a block whose content they also name: then the order matters."""
        scheduler, table = self._scheduler, self._scheduler.table
        evicted = scheduler.pool.next_evicted(num_blocks)
        which = np.flatnonzero(self._fills < count)
        if not len(evicted) or not len(which):
            return False
        rows, firsts = self.rows[which], table.num_named_blocks[self.rows[which]] * self._size
        owners, places = rows.repeat(self._size), (firsts[:, None] + np.arange(self._size)).ravel()
        is_new = places >= table.num_tokens[owners]  # of these steps; earlier ones have other values in the table
        tokens = table.tokens.get(owners, places)
        tokens[is_new] = self._executor.tokens_at(owners[is_new], (places - table.num_prompt_tokens[owners])[is_new])
        tokens = tokens.reshape(-1, self._size)
        keys = block_keys(table.content[rows].view(np.uint64), hash_blocks(tokens))
        return bool(np.isin(keys, scheduler.pool.names.described(evicted)[0]).any())


def _may_join(config: ResolvedConfig, executor: OracleExecutor) -> bool:
    """Return whether steps of an engine with these options may be joined at all."""
    keeps = config.num_host_blocks or config.kv_window or executor.info.state_bytes
    charges = config.scheduling_policy == "fair" or config.scheduler_delay_factor
    return most_in_flight(config) == 1 and config.speculative_config is None and not (keeps or charges)


def _in_turn(steps: Ints, count: int) -> Ints:
    """Return the indices of the entries below count, by entry and then by index."""
    order = np.argsort(steps, kind="stable")
    in_turn: Ints = order[: np.searchsorted(steps[order], count)]
    return in_turn


# Arrivals: when the requests of a recording arrive in a simulation.


class Arrivals:
    """A queue of requests by the time of their arrival.

    A client that never had two requests at the same time in the capture waits for its answer, and then as long as it
    did then (closed loop). All others send at their recorded times (open loop).
    """

    def __init__(self, requests: Sequence[Recorded], *, is_open: bool) -> None:
        """is_open: keep the recorded times of all clients."""
        self._queue = list[tuple[int, int]]()  # (ns, index), a heap
        self._next: dict[int, tuple[int, int]] = {}  # by index: (index of the client's next one, its think time in ns)
        of_client: dict[int, list[int]] = {}
        for index, one in enumerate(requests):
            of_client.setdefault(one.client, []).append(index)
        for indices in of_client.values():
            thinks = {
                first: (second, requests[second].received_ns - requests[first].ended_ns)
                for first, second in pairwise(indices)
            }
            waits = all(requests[first].ended_ns and ns >= 0 for first, (_, ns) in thinks.items())
            if waits and not is_open:
                self._next |= thinks
                indices = indices[:1]
            self._queue += [(requests[index].received_ns, index) for index in indices]
        heapq.heapify(self._queue)

    @property
    def next_ns(self) -> int | None:
        """Return when the next request arrives; None: no further request will arrive."""
        return self._queue[0][0] if self._queue else None

    def take(self, now_ns: int) -> list[tuple[int, int]]:
        """Remove the requests that have arrived by now and return their (ns, index)."""
        taken = []
        while self._queue and self._queue[0][0] <= now_ns:
            taken.append(heapq.heappop(self._queue))
        return taken

    def note_end(self, index: int, now_ns: int) -> None:
        """Note the end of a request for which its client may have waited."""
        if index in self._next:
            following, think_ns = self._next.pop(index)
            heapq.heappush(self._queue, (now_ns + think_ns, following))


_MAX_EMPTY_STEPS = 100_000  # in a row, with live requests, after which the engine counts as stuck
_ANY = 2**31  # steps: more than are ever joined
_POLL_NS = 1_000_000  # from a step that could run nothing to the next one: deadlines and pauses pass in that time


class StuckError(CaptureFileError):
    """With these options the engine stops making progress."""


class Moments(msgspec.Struct):
    """The times of one request in ns; 0 = never."""

    arrived: int = 0
    first_token: int = 0
    last_token: int = 0
    ended: int = 0
    was_aborted: bool = False
    num_tokens: int = 0  # of its first choice


class Simulated(NamedTuple):
    """One simulated run. moments: in the order of the recording's requests."""

    moments: list[Moments]
    num_tokens: int
    num_steps: int
    num_cached_tokens: int
    num_preemptions: int
    begin_ns: int
    end_ns: int
    num_uncovered_steps: int  # beyond the steps that the step time was fitted to
    num_made_up_tokens: int  # beyond those recorded
    max_used_blocks: int  # of the KV cache at a time


def simulate(
    config: ResolvedConfig,
    info: ModelInfo,
    recording: Recording,
    time: StepTime,
    *,
    is_open: bool = False,
    pace: Pace | None = None,
    executor: type[OracleExecutor] = OracleExecutor,
    look: "Callable[[Run], None] | None" = None,
    joins: bool = True,
    most_empty_steps: int = _MAX_EMPTY_STEPS,
) -> Simulated:
    """Simulate until all requests have ended.

    is_open: all clients keep their recorded times. pace: how fast the machine is; None = always as the fit says.
    executor: returns the tokens. look: called after each step; then no steps are joined. joins: steps with the same
    decisions are one call (joined_steps.py), which changes no figure. most_empty_steps: number of empty steps in a row
    after which the engine counts as stuck. Errors: StuckError.
    """
    run = Run(config, info, recording, Arrivals(recording.requests, is_open=is_open), executor=executor)
    clock = _Clock(recording, time, pace)
    joined = JoinedSteps(config, run.engine, run.executor) if joins and look is None else None
    num_empty = 0
    while run.goes_on:
        if not run.engine.has_unfinished and run.arrivals.next_ns is not None:
            clock.now_ns = max(clock.now_ns, run.arrivals.next_ns)
        inbox = run.take_inbox(clock.now_ns)
        if joined is not None and not inbox and not run.num_odd and run.join(joined, clock):
            continue
        replies = run.engine.step(inbox, clock.now_ns)
        features = run.watcher.take()
        if features is None:
            num_empty += 1
            if num_empty > most_empty_steps:
                steps = counted(clock.num_steps, "step")
                raise StuckError(f"with these options no request makes progress after {steps}")
            end_ns = clock.now_ns + (recording.empty_ns if run.engine.has_work else _POLL_NS)
        else:
            end_ns, num_empty = clock.end_of(features), 0
        run.note(replies, end_ns)
        if look is not None:
            look(run)
        clock.now_ns = end_ns + recording.gap_ns
    return run.result(clock)


class _Clock:
    """The virtual clock: now_ns is the start of the next step. pace: see simulate()."""

    def __init__(self, recording: Recording, time: StepTime, pace: Pace | None) -> None:
        self.now_ns = self.begin_ns = recording.begin_ns
        self.gap_ns = recording.gap_ns
        self.num_steps = self.num_uncovered = 0
        self._time, self._pace = time, pace
        self._done = 0.0  # ns of fitted durations

    def end_of(self, features: Ints) -> int:
        """Count a step with these features that begins now, and return when it ends."""
        self.num_steps += 1
        self.num_uncovered += self._time.num_uncovered(features[None])
        (done,), (duration,) = self._look(features[None])
        self._done = float(done)
        return self.now_ns + int(duration)

    def run_all(self, features: Ints, until: int | None) -> Ints:
        """Count those of these consecutive steps that begin before `until`, and return when each ends.

        The next step begins after the last of them.
        """
        done, durations = self._look(features)
        spans = durations + self.gap_ns
        nexts = self.now_ns + spans.cumsum()
        count = len(features) if until is None else int(np.searchsorted(nexts - spans, until))
        if count:
            self.now_ns, self._done = int(nexts[count - 1]), float(done[count - 1])
            self.num_steps += count
            self.num_uncovered += self._time.num_uncovered(features[:count])
        ends: Ints = nexts[:count] - self.gap_ns
        return ends

    def _look(self, features: Ints) -> tuple[Doubles, Ints]:
        """Return what is done after each of these consecutive steps [n], and the duration of each in ns, at least 1."""
        fitted = self._time.of_each(features)
        done = np.concatenate([[self._done], fitted]).cumsum()
        durations = fitted if self._pace is None else np.diff(self._pace.times(done))
        return done[1:], np.maximum(np.rint(durations).astype(np.int64), 1)


class Run:
    """The state of a simulation: the engine, the arrivals and the results."""

    def __init__(
        self,
        config: ResolvedConfig,
        info: ModelInfo,
        recording: Recording,
        arrivals: Arrivals,
        *,
        executor: type[OracleExecutor],
    ) -> None:
        self.arrivals = arrivals
        tokens = tokens_of(recording.requests)
        self.executor = executor(config, info, tokens, recording.candidates, offers=recording.offers)
        self.watcher = FeatureWatcher()
        self.engine = EngineCore(config, self.executor, watchers=[self.watcher])
        self.watcher.table = self.executor.table = self.engine.scheduler.table
        self.moments = [Moments() for _ in recording.requests]
        self.end_ns = 0
        self.num_odd = 0  # live requests that joined steps cannot handle
        self._requests = recording.requests
        self._live: dict[RequestKey, int] = {}
        self._num_open: dict[int, int] = {}  # choices, by index
        self._aborts = list[tuple[int, RequestKey]]()  # (ns, request), a heap: aborts to come
        self._cancelled: dict[RequestKey, int] = {}  # live requests to be aborted after some tokens: index

    @property
    def goes_on(self) -> bool:
        """Return whether a request is live or will arrive."""
        return self.arrivals.next_ns is not None or self.engine.has_unfinished

    @property
    def num_before_abort(self) -> int:
        """Return how many steps of one token for each row may pass until a step whose token makes a client abort."""
        left = [len(self._requests[at].token_times) - self.moments[at].num_tokens for at in self._cancelled.values()]
        return min(left, default=_ANY) - 1

    def result(self, clock: _Clock) -> Simulated:
        """Return the run as it is now."""
        stats = self.engine.scheduler.stats
        return Simulated(
            self.moments,
            stats.num_generation_tokens,
            clock.num_steps,
            stats.prefix_cache_hits,
            stats.num_preemptions,
            clock.begin_ns,
            self.end_ns,
            clock.num_uncovered,
            self.executor.num_made_up,
            stats.max_used_blocks,
        )

    def take_inbox(self, now_ns: int) -> list[tuple[int, EngineInput]]:
        """Return the requests that have arrived, and the aborts that are due."""
        inbox = list[tuple[int, EngineInput]]()
        for arrived_ns, index in self.arrivals.take(now_ns):
            one, key = self._requests[index], self._requests[index].key
            self._live[key], self._num_open[index] = index, one.num_choices
            self.num_odd += one.is_odd
            self.moments[index].arrived = arrived_ns
            inbox.append((one.client, one.message))
            if one.aborted_ns and one.token_times:
                self._cancelled[key] = index
            elif one.aborted_ns:
                heapq.heappush(self._aborts, (arrived_ns + one.aborted_ns - one.received_ns, key))
        while self._aborts and self._aborts[0][0] <= now_ns:
            client, number = heapq.heappop(self._aborts)[1]
            inbox.append((client, Abort(np.array([number], "<u4").tobytes())))
        return inbox

    def note(self, replies: Sequence[tuple[int, EngineReply]], end_ns: int) -> None:
        """Note the replies of a step that ends at this time."""
        self.end_ns = end_ns
        for client, reply in replies:
            if isinstance(reply, RequestFailed) and (client, reply.number) in self._live:
                self._end((client, reply.number), end_ns)
            elif isinstance(reply, Outputs):
                self._note_outputs(client, reply, end_ns)

    def join(self, joined: JoinedSteps, clock: _Clock) -> bool:
        """Simulate the joined steps that begin before anything else happens; return whether there are any."""
        if not joined.look(self.num_before_abort):
            return False
        features = decoding_features(len(joined.rows), joined.num_read(), joined.count)
        ends = clock.run_all(features, self._next_ns())
        if not len(ends):
            return False
        count, first_end, last_end = len(ends), int(ends[0]), int(ends[-1])
        joined.take(count)
        self.end_ns = last_end
        for key in zip(*(one.tolist() for one in self.engine.scheduler.table.address(joined.rows)[:2]), strict=True):
            moments = self.moments[self._live[key]]
            moments.first_token = moments.first_token or first_end
            moments.last_token = last_end
            moments.num_tokens += count
        return True

    def _next_ns(self) -> int | None:
        """Return when the next request or abort arrives, or None."""
        times = [self._aborts[0][0]] if self._aborts else []
        if self.arrivals.next_ns is not None:
            times.append(self.arrivals.next_ns)
        return min(times, default=None)

    def _note_outputs(self, client: int, outputs: Outputs, end_ns: int) -> None:
        """Note how many tokens each choice has, and which choices have ended; token ids do not matter here."""
        numbers, counts = np.frombuffer(outputs.numbers, "<u4").tolist(), np.frombuffer(outputs.counts, "<u2").tolist()
        choices = np.frombuffer(outputs.choices, "<u2").tolist() if outputs.choices else [0] * len(numbers)
        live, all_moments, requests = self._live, self.moments, self._requests
        for number, choice, count, finish in zip(
            numbers, choices, counts, outputs.finish or bytes(len(numbers)), strict=True
        ):
            key = client, number
            if (index := live.get(key)) is None:
                continue
            if count and not choice:
                one, moments = requests[index], all_moments[index]
                moments.first_token = moments.first_token or end_ns
                moments.last_token = end_ns
                moments.num_tokens += count
                if one.aborted_ns and moments.num_tokens >= len(one.token_times):
                    heapq.heappush(self._aborts, (end_ns, key))
            if finish:
                self._num_open[index] -= 1
                if not self._num_open[index]:
                    self._end(key, end_ns)

    def _end(self, key: RequestKey, end_ns: int) -> None:
        index = self._live.pop(key)
        self._cancelled.pop(key, None)
        self.num_odd -= self._requests[index].is_odd
        self.moments[index].ended = end_ns
        self.moments[index].was_aborted = bool(self._requests[index].aborted_ns)
        self.arrivals.note_end(index, end_ns)


def tokens_of(requests: Sequence[Recorded]) -> dict[tuple[int, int, int], list[int]]:
    """Return the output tokens of each choice by (client, number, choice)."""
    return {(*one.key, choice): tokens for one in requests for choice, tokens in enumerate(one.tokens)}
