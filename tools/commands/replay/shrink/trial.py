"""Trial: one run of a workload on the real scheduler, under a virtual clock, with checks for everything that could go
wrong.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from core.engine import EngineCore
from core.execution.executor import ModelInfo, StepHandle
from core.execution.plan import SchedulerOutput
from core.executors.fake import mix
from ipc.options.resolved import ResolvedConfig
from ipc.tables.arrays import Ints, UInt64s
from tools.commands.replay.fails_when import TIMES, FailsWhen, Value
from tools.commands.replay.latency import Times, latencies
from tools.commands.replay.shrink.mirrored_oracle import MirroredOracle
from tools.commands.replay.shrink.workload import Workload
from tools.commands.replay.what_if.oracle_executor import Candidates, ChoiceKey, Offers
from tools.commands.replay.what_if.recording import unmeasured
from tools.commands.replay.what_if.simulation import Moments, Run, StuckError, simulate
from tools.commands.replay.what_if.step_time import FEATURES, StepTime

_STEP_NS = 1_000_000  # of each step, if its time does not matter
_MAX_EMPTY_STEPS = 1000  # in a row, after which the run counts as stuck
_NS = 1e-9
#: One millisecond for each step, independent of its content.
CONSTANT = StepTime(
    np.array([_STEP_NS, *[0.0] * (len(FEATURES) - 1)]), np.full(len(FEATURES), 2**62), np.ones(1), 0.0, 0.0
)


class BrokenError(Exception):
    """The scheduler's own counts do not agree."""


class Trial:
    """Runs of workloads, judged by one condition. time: of steps, if the condition names times."""

    def __init__(self, condition: FailsWhen, time: StepTime = CONSTANT) -> None:
        self._condition = condition
        self._time = time if condition.names & TIMES else CONSTANT
        self._executor = KVContents if "misread" in condition.names else MirroredOracle
        self._counts = "broken" in condition.names
        self.num_runs = 0

    def fails(self, workload: Workload) -> bool:
        """Return whether the condition is true for a run."""
        return self._condition.holds(self.values(workload))

    def values(self, workload: Workload) -> Mapping[str, Value]:
        """Run the workload, and return the values of the condition's NAMES."""
        self.num_runs += 1
        most: dict[tuple[int, int, int], int] = {}
        state: list[Run] = []

        def look(run: Run) -> None:
            state[:] = [run]
            scheduler = run.engine.scheduler
            if self._counts:
                _recount(run.engine)
            if scheduler.stats.num_preemptions and "most_preemptions" in self._condition.names:
                for one in scheduler.live_requests():
                    if one.num_preemptions:
                        most[one.client, one.number, one.choice] = one.num_preemptions

        error: Exception | None = None
        try:
            simulate(
                workload.config,
                workload.info,
                unmeasured(workload.requests, 0, _STEP_NS // 10),
                self._time,
                is_open=True,
                executor=self._executor,
                look=look,
                most_empty_steps=_MAX_EMPTY_STEPS,
            )
        except Exception as one:  # a faulty scheduler may raise anything
            error = one
        return {
            **_errors(error),
            **_figures(state[0] if state else None),
            "most_preemptions": max(most.values(), default=0),
        }


def _errors(error: Exception | None) -> dict[str, Value]:
    kinds = (BrokenError, StuckError, MisreadError)
    return {
        "crashed": error is not None and not isinstance(error, kinds),
        "broken": isinstance(error, BrokenError),
        "stuck": isinstance(error, StuckError),
        "misread": isinstance(error, MisreadError),
        "error": "" if error is None else f"{type(error).__name__}: {error}",
    }


def _figures(run: Run | None) -> dict[str, Value]:
    if run is None:
        return {}
    stats, found = run.engine.scheduler.stats, latencies([_times(one) for one in run.moments])
    seconds = max(_NS, (run.end_ns - min((one.arrived for one in run.moments if one.arrived), default=0)) * _NS)
    return {
        "unfinished": sum(bool(one.arrived) and not one.ended for one in run.moments),
        "ttft_mean": found.ttft_ms.mean if found.ttft_ms else None,
        "ttft_p99": found.ttft_ms.p99 if found.ttft_ms else None,
        "tpot_mean": found.tpot_ms.mean if found.tpot_ms else None,
        "e2e_mean": found.e2e_ms.mean if found.e2e_ms else None,
        "e2e_p99": found.e2e_ms.p99 if found.e2e_ms else None,
        "tokens_per_s": stats.num_generation_tokens / seconds,
        "steps": stats.num_steps,
        "preemptions": stats.num_preemptions,
        "cached_tokens": stats.prefix_cache_hits,
    }


def _times(one: Moments) -> Times:
    return Times(
        one.arrived * _NS,
        one.first_token * _NS if one.first_token else None,
        one.last_token * _NS if one.last_token else None,
        one.ended * _NS if one.ended and not one.was_aborted else None,
        one.num_tokens,
    )


def _recount(engine: EngineCore) -> None:
    try:
        engine.scheduler.check_integrity()
    except AssertionError as error:
        raise BrokenError(str(error)) from None


# KVContents: an executor that tracks the content of a KV cache and reads each context back through the block tables.


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class MisreadError(Exception):
    """A row reads a block that does not contain the row's own tokens."""


class KVContents(MirroredOracle):
    """A MirroredOracle whose KV cache has, in each slot, the checksum of all tokens up to that slot.

    If layers with a window have separate blocks, the cache is that of the other layers.
    Errors of execute(): MisreadError.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        info: ModelInfo,
        tokens: Mapping[ChoiceKey, Sequence[int]],
        candidates: Candidates | None = None,
        *,
        offers: Offers | None = None,
    ) -> None:
        super().__init__(config, info, tokens, candidates, offers=offers)
        self._size, self._window = config.block_size, config.kv_window
        self._has_pages = bool(config.kv_page_blocks)  # otherwise layers with a window keep no block behind the window
        num_blocks = config.num_blocks_override * max(1, config.kv_page_blocks)
        self._kv = np.zeros((num_blocks, config.block_size), np.uint64)
        self._host = np.zeros((config.num_host_slots, config.block_size), np.uint64)

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Run one step, write what it computes, and check what its rows have read."""
        self._host[plan.swapped_out_slots] = self._kv[plan.swapped_out_blocks]
        self._kv[plan.copied_to] = self._kv[plan.copied_blocks]
        self._kv[plan.swapped_in_blocks] = self._host[plan.swapped_in_slots]
        step = super().execute(plan)
        firsts, slots, sums = list[int](), list[Ints](), list[UInt64s]()  # of what each row reads
        for row, count in zip(plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), strict=True):
            end = int(self.mirror.num_computed_tokens[row])
            of_row, sums_of_row = self._slots(row, end), self._prefix_sums(row, end)
            self._kv.reshape(-1)[of_row[end - count :]] = sums_of_row[end - count :]
            first = max(0, end - count - self._window + 1) if self._window and not self._has_pages else 0
            firsts.append(first)
            slots.append(of_row[first:])
            sums.append(sums_of_row[first:])
        rows = plan.rows.tolist()
        for row, first, of_row, wanted in zip(rows, firsts, slots, sums, strict=True):  # after all have written
            wrong = first + np.flatnonzero(self._kv.reshape(-1)[of_row] != wanted)
            if len(wrong):
                raise MisreadError(f"step {plan.step}: row {row} reads other content at positions {wrong[:8].tolist()}")
        return step

    def _slots(self, row: int, end: int) -> Ints:
        positions = np.arange(end)
        blocks = self.mirror.blocks.read(row, 0, -(-end // self._size)).astype(np.int64)
        return blocks[positions // self._size] * self._size + positions % self._size

    def _prefix_sums(self, row: int, end: int) -> UInt64s:
        ids = self.mirror.tokens.read(row, 0, end).astype(np.uint64)
        return np.cumsum(mix((ids + np.uint64(1)) * _GOLDEN + mix(np.arange(1, end + 1, dtype=np.uint64))))
