"""Trial: a workload run once on the real scheduler, under a virtual clock, with all that could be wrong about it."""

from collections.abc import Mapping

import numpy as np

from core.engine import EngineCore
from tools.commands.replay.fails_when import TIMES, FailsWhen, Value
from tools.commands.replay.latency import Times, latencies
from tools.commands.replay.shrink.kv_contents import KVContents, MisreadError
from tools.commands.replay.shrink.mirrored_oracle import MirroredOracle
from tools.commands.replay.shrink.workload import Workload
from tools.commands.replay.what_if.recording import Recording
from tools.commands.replay.what_if.simulation import Moments, Run, StuckError, simulate
from tools.commands.replay.what_if.step_time import FEATURES, StepTime

_STEP_NS = 1_000_000  # of each step, where its time does not matter
_MAX_EMPTY_STEPS = 1000  # one after the other, after which nothing moves any more
_NS = 1e-9
#: A millisecond for each step, whatever is in it.
CONSTANT = StepTime(
    np.array([_STEP_NS, *[0.0] * (len(FEATURES) - 1)]), np.full(len(FEATURES), 2**62), np.ones(1), 0.0, 0.0
)


class BrokenError(Exception):
    """The scheduler's own counts do not agree."""


class Trial:
    """Runs of workloads, judged by one condition. time: of steps, where the condition names times."""

    def __init__(self, condition: FailsWhen, time: StepTime = CONSTANT) -> None:
        self._condition = condition
        self._time = time if condition.names & TIMES else CONSTANT
        self._executor = KVContents if "misread" in condition.names else MirroredOracle
        self._counts = "broken" in condition.names
        self.num_runs = 0

    def fails(self, workload: Workload) -> bool:
        """Return whether the condition holds of a run."""
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
                _recording(workload),
                self._time,
                is_open=True,
                executor=self._executor,
                look=look,
                most_empty_steps=_MAX_EMPTY_STEPS,
            )
        except Exception as one:  # what a wrong scheduler raises may be anything
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


def _recording(workload: Workload) -> Recording:
    begin_ns = workload.requests[0].received_ns
    nothing = np.zeros((0, len(FEATURES)), np.int64), np.zeros(0, np.int64)
    return Recording(workload.requests, *nothing, 0, _STEP_NS // 10, 0, 0, 0, begin_ns, begin_ns)
