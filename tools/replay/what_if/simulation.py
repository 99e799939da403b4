"""Simulation: a recording's requests through the real scheduler, under a virtual clock and maybe with other options."""

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from core.engine import EngineCore
from core.execution.executor import ModelInfo
from core.inputs import EngineInput, EngineReply
from ipc.arrays import Doubles
from ipc.config import EngineConfig
from ipc.errors import CaptureFileError
from ipc.messages import Abort, Outputs, RequestFailed
from tools.replay.what_if.arrivals import Arrivals
from tools.replay.what_if.oracle_executor import OracleExecutor
from tools.replay.what_if.recording import Recorded, Recording, RequestKey
from tools.replay.what_if.step_time import FeatureWatcher, StepTime

_MAX_EMPTY_STEPS = 100_000  # one after the other, with requests alive, after which the engine counts as stuck
_POLL_NS = 1_000_000  # from a step that could run nothing to the next: deadlines and pauses pass meanwhile


class StuckError(CaptureFileError):
    """With these options the engine makes no progress any more."""


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


def simulate(
    config: EngineConfig,
    info: ModelInfo,
    recording: Recording,
    time: StepTime,
    *,
    is_open: bool = False,
    ratios: Doubles | None = None,
    executor: type[OracleExecutor] = OracleExecutor,
    look: "Callable[[Run], None]" = lambda _: None,
    most_empty_steps: int = _MAX_EMPTY_STEPS,
) -> Simulated:
    """Simulate until all requests have ended.

    config: resolved. is_open: all clients keep their recorded times. ratios: factors of the steps' durations, one after
    the other. executor: what makes the tokens. look: called after each step. most_empty_steps: one after the other,
    after which the engine counts as stuck. Errors: StuckError.
    """
    run = Run(config, info, recording, Arrivals(recording.requests, is_open=is_open), executor)
    now_ns, num_steps, num_uncovered, num_empty = recording.begin_ns, 0, 0, 0
    while run.goes_on:
        if not run.engine.has_unfinished and run.arrivals.next_ns is not None:
            now_ns = max(now_ns, run.arrivals.next_ns)
        replies = run.engine.step(run.take_inbox(now_ns), now_ns)
        features = run.watcher.take()
        if features is None:
            num_empty += 1
            if num_empty > most_empty_steps:
                raise StuckError(f"with these options no request makes progress after {num_steps} steps")
            end_ns = now_ns + (recording.empty_ns if run.engine.has_work else _POLL_NS)
        else:
            factor = 1.0 if ratios is None else float(ratios[num_steps % len(ratios)])
            end_ns = now_ns + max(1, round(time.of(features) * factor))
            num_steps, num_empty = num_steps + 1, 0
            num_uncovered += not time.is_covered(features)
        run.note(replies, end_ns)
        look(run)
        now_ns = end_ns + recording.gap_ns
    stats = run.engine.scheduler.stats
    return Simulated(
        run.moments,
        stats.num_generation_tokens,
        num_steps,
        stats.prefix_cache_hits,
        stats.num_preemptions,
        recording.begin_ns,
        run.end_ns,
        num_uncovered,
        run.executor.num_made_up,
    )


class Run:
    """The state of a simulation: the engine, what arrives, and what has come out."""

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        recording: Recording,
        arrivals: Arrivals,
        executor: type[OracleExecutor],
    ) -> None:
        self.arrivals = arrivals
        self.executor = executor(config, info, tokens_of(recording.requests), recording.candidates)
        self.executor.initialize_cache(config)
        self.watcher = FeatureWatcher()
        self.engine = EngineCore(config, self.executor, watchers=[self.watcher])
        self.watcher.table = self.executor.table = self.engine.scheduler.table
        self.moments = [Moments() for _ in recording.requests]
        self.end_ns = 0
        self._requests = recording.requests
        self._live: dict[RequestKey, int] = {}
        self._num_open: dict[int, int] = {}  # choices, by index
        self._aborts = list[tuple[int, RequestKey]]()  # (ns, request), a heap: what clients will abort

    @property
    def goes_on(self) -> bool:
        """Return whether a request lives or is on its way."""
        return self.arrivals.next_ns is not None or self.engine.has_unfinished

    def take_inbox(self, now_ns: int) -> list[tuple[int, EngineInput]]:
        """Return the requests that have arrived, and the aborts that are due."""
        inbox = list[tuple[int, EngineInput]]()
        for arrived_ns, index in self.arrivals.take(now_ns):
            one, key = self._requests[index], self._requests[index].key
            self._live[key], self._num_open[index] = index, one.num_choices
            self.moments[index].arrived = arrived_ns
            inbox.append((one.client, one.message))
            if one.aborted_ns and not one.token_times:
                heapq.heappush(self._aborts, (arrived_ns + one.aborted_ns - one.received_ns, key))
        while self._aborts and self._aborts[0][0] <= now_ns:
            client, number = heapq.heappop(self._aborts)[1]
            inbox.append((client, Abort(np.array([number], "<u4").tobytes())))
        return inbox

    def note(self, replies: Sequence[tuple[int, EngineReply]], end_ns: int) -> None:
        """Note the replies of a step that ends then."""
        self.end_ns = end_ns
        for client, reply in replies:
            if isinstance(reply, RequestFailed) and (client, reply.number) in self._live:
                self._end((client, reply.number), end_ns)
            elif isinstance(reply, Outputs):
                self._note_outputs(client, reply, end_ns)

    def _note_outputs(self, client: int, outputs: Outputs, end_ns: int) -> None:
        """Note how many tokens each choice has got, and which have ended; which tokens does not matter here."""
        numbers, counts = np.frombuffer(outputs.numbers, "<u4").tolist(), np.frombuffer(outputs.counts, "<u2").tolist()
        choices = np.frombuffer(outputs.choices, "<u2").tolist() if outputs.choices else [0] * len(numbers)
        for number, choice, count, finish in zip(
            numbers, choices, counts, outputs.finish or bytes(len(numbers)), strict=True
        ):
            key = client, number
            if (index := self._live.get(key)) is None:
                continue
            if count and not choice:
                one, moments = self._requests[index], self.moments[index]
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
        self.moments[index].ended = end_ns
        self.moments[index].was_aborted = bool(self._requests[index].aborted_ns)
        self.arrivals.note_end(index, end_ns)


def tokens_of(requests: Sequence[Recorded]) -> dict[tuple[int, int, int], list[int]]:
    """Return the output tokens of each choice by (client, number, choice)."""
    return {(*one.key, choice): tokens for one in requests for choice, tokens in enumerate(one.tokens)}
