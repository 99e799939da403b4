"""TrialLoop: measures steps of the engine's loop on a device, with plans of one row, before any request."""

from typing import NamedTuple, Protocol

import numpy as np

from core.execution.executor import StepCosts, StepHandle
from core.execution.plan import NewRow, SchedulerOutput
from core.runner.step_durations import Clock
from ipc.params.sampling_params import SamplingParams
from ipc.tables.arrays import NO_INT32S, Int32s

#: Time the engine spends around a step, simulated by waiting: planning it and passing on its tokens, 130 calls in
#: Python.
ENGINE_NS = 150_000
#: Tokens of a step that verifies drafts, and the most consecutive steps of each kind.
_VERIFIED, _NUM_PLAIN, _NUM_VERIFYING = 8, 8, 4
#: Tokens of a trial row: at least one that starts it and three plain steps. More than the second number are not used.
LEAST_TOKENS, MOST_TOKENS = 4, 1 + _VERIFIED * _NUM_VERIFYING
_NUM_ROUNDS = 7
_PATIENCE_NS = 1_000_000_000  # no further round starts after this time


class Runner(Protocol):
    """What a loop needs from its runner."""

    def begin(self, plan: SchedulerOutput) -> StepHandle:
        """Launch a step and return its handle."""


class LoopDurations(NamedTuple):
    """Durations in ns, of the host's and the device's work together."""

    plain_ns: int  # from result to result of steps of one token, each started before the previous one has ended
    verifying_ns: int  # of a step with drafts that nothing overlaps with
    num_tokens: int  # tokens of the latter


def loop_costs(loop: LoopDurations, apart: tuple[int, ...], overlapping: tuple[int, ...]) -> StepCosts:
    """Return the durations of the loop's steps of 1, 2, 4, ... tokens.

    apart: the device's durations of these steps, including launches. overlapping: the same if the steps overlap. A step
    of the loop takes at least as long as the host's work, however little the device has to do.
    """
    verified = apart[min(loop.num_tokens.bit_length(), len(apart)) - 1]
    alone = tuple(max(1, loop.verifying_ns + duration - verified) for duration in apart)
    return StepCosts(tuple(max(loop.plain_ns, duration) for duration in overlapping), 0, alone)


class TrialLoop:
    """The loop of a single request at depth 2: without drafts, and with drafts in each step."""

    def __init__(self, runner: Runner, blocks: Int32s, most_tokens: int, most_verified: int, *, used: Clock) -> None:
        """blocks: of the trial row, for most_tokens tokens. most_verified: tokens of a step. used: the clock."""
        self._runner, self._blocks, self._used = runner, blocks, used
        self._num_plain = min(_NUM_PLAIN, most_tokens - 1)
        self._num_tokens = min(_VERIFIED, most_tokens - 1, max(2, most_verified))
        self._num_verifying = min(_NUM_VERIFYING, (most_tokens - 1) // self._num_tokens)
        self._is_there = False

    def measure(self) -> LoopDurations:
        """Return the shortest durations of some rounds.

        The row stays in the runner; end() is the plan that removes it.
        """
        self._plain()  # compiles kernels and captures graphs
        self._verifying()
        begin, plain, verifying = self._used(), list[int](), list[int]()
        while len(plain) < _NUM_ROUNDS and (not plain or self._used() - begin < _PATIENCE_NS):
            plain.append(self._plain())
            verifying.append(self._verifying())
        return LoopDurations(max(1, min(plain)), max(1, min(verifying)), self._num_tokens)

    def end(self) -> SchedulerOutput:
        """Return the plan that removes the row and runs nothing."""
        return _plan(0, removed=self._is_there)

    def _plain(self) -> int:
        """Run steps without drafts, and return the time from one result to the next."""
        self._start()
        times, flying = list[int](), self._next(0)
        for _ in range(self._num_plain - 1):
            following = self._next(0)
            flying.result()
            times.append(self._used())
            flying = following
        flying.result()
        # the first result waits for two launches, so it is only the start
        return (times[-1] - times[0]) // (len(times) - 1)

    def _verifying(self) -> int:
        """Run steps with drafts, each to its end, and return the duration of one."""
        self._start()
        begin = self._used()
        for _ in range(self._num_verifying):
            self._next(self._num_tokens - 1).result()
        return (self._used() - begin) // self._num_verifying

    def _start(self) -> None:
        """Compute the row's first token, in place of the previous row."""
        row = NewRow(0, np.zeros(1, np.int32), 1, 0, self._blocks, SamplingParams(temperature=1.0), 0)
        self._runner.begin(_plan(1, removed=self._is_there, added=[row])).result()
        self._is_there = True

    def _next(self, num_drafts: int) -> StepHandle:
        """Start the row's next step, after the engine's work."""
        until = self._used() + ENGINE_NS
        while self._used() < until:
            pass
        return self._runner.begin(_plan(1 + num_drafts, num_drafts))


def _plan(
    num_tokens: int, num_drafts: int = 0, *, removed: bool = False, added: list[NewRow] | None = None
) -> SchedulerOutput:
    """Return a plan of row 0, or of no row if it has no tokens."""
    row = np.zeros(1, np.int32)
    rows, counts = (row, np.array([num_tokens], np.int32)) if num_tokens else (NO_INT32S, NO_INT32S)
    leaves = row if removed else NO_INT32S
    return SchedulerOutput(
        step=0,
        removed_rows=leaves,
        added=added or [],
        block_rows=NO_INT32S,
        block_ids=NO_INT32S,
        rows=rows,
        num_scheduled_tokens=counts,
        num_draft_tokens=np.array([num_drafts], np.int32) if num_drafts else NO_INT32S,
        draft_token_ids=np.zeros(num_drafts, np.int32),
    )
