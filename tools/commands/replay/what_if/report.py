"""The report of a what-if: recorded, simulated and changed figures side by side, each with its error bar."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from core.execution.executor import ModelInfo
from ipc.options.resolved import ResolvedConfig
from tools.commands.replay.latency import Latencies, Times, latencies
from tools.commands.replay.what_if.options import Change, changed
from tools.commands.replay.what_if.recording import Recording
from tools.commands.replay.what_if.simulation import Simulated, simulate
from tools.commands.replay.what_if.step_time import FEATURES, Pace, StepTime

NUM_SPREAD_RUNS = 8
_NS = 1e-9


class Figures(msgspec.Struct, frozen=True):
    """The figures of one run. None: no request has such a figure."""

    tokens_per_s: float
    ttft_mean_ms: float | None
    ttft_p99_ms: float | None
    tpot_mean_ms: float | None
    e2e_mean_ms: float | None
    e2e_p99_ms: float | None
    num_tokens: int
    num_steps: int
    num_cached_tokens: int
    num_preemptions: int


#: Figures that have an error bar.
TIMES = ("tokens_per_s", "ttft_mean_ms", "ttft_p99_ms", "tpot_mean_ms", "e2e_mean_ms", "e2e_p99_ms")


class Changed(msgspec.Struct, frozen=True):
    """One what-if. difference: of TIMES, percent of the captured configuration's simulation.

    error: of TIMES, percent: the larger of the simulation's error on the capture and the spread of runs with newly
    drawn step deviations. A smaller difference may be none.
    """

    options: Change
    figures: Figures
    difference: dict[str, float]
    error: dict[str, float]
    uncovered_percent: float  # of steps larger than any that was measured: their times are extrapolated
    num_made_up_tokens: int  # of requests that get further than in the capture


class WhatIf(msgspec.Struct, frozen=True):
    """The result of `engine-core replay FILE --what-if ...`. Times in ns and milliseconds, as named."""

    capture: str
    model: str
    numerics: str
    num_requests: int
    step_ns: dict[str, float]  # the fitted cost of one unit of each feature
    step_error_mean_percent: float
    step_error_median_percent: float
    slow_steps_percent: float  # that took over three times as long as fitted: they were disturbed
    recorded: Figures
    simulated: Figures  # with the captured options
    simulated_error: dict[str, float]  # of TIMES: percent of the recorded value
    spread: dict[str, float]  # of TIMES, percent: half the range over runs with other step deviations
    changes: list[Changed]


class Simulator(NamedTuple):
    """The state that all simulations of one capture share. is_open: all clients keep their recorded times."""

    config: ResolvedConfig  # the captured engine's
    info: ModelInfo
    recording: Recording
    time: StepTime
    is_open: bool

    def run(self, config: ResolvedConfig, pace: Pace | None = None) -> Simulated:
        """Simulate with this config. pace: see simulate()."""
        return simulate(config, self.info, self.recording, self.time, is_open=self.is_open, pace=pace)

    def spread(self) -> dict[str, float]:
        """Return half the range of TIMES, in percent, over runs whose steps deviate as the measured ones do."""
        draw = np.random.default_rng(0)
        paces = [self.time.pace.drawn(draw) for _ in range(NUM_SPREAD_RUNS)]
        runs = [figures_of(self.run(self.config, one)) for one in paces]
        spread = {}
        for name in TIMES:
            values = [value for run in runs if (value := getattr(run, name)) is not None]
            middle = sum(values) / len(values) if values else 0.0
            spread[name] = round(50 * (max(values) - min(values)) / middle, 1) if middle else 0.0
        return spread


def what_if(capture: str, simulator: Simulator, changes: Sequence[Change]) -> WhatIf:
    """Simulate the captured configuration, and each change. Errors: ConfigError, CaptureFileError."""
    configs = [changed(simulator.config, change) for change in changes]
    recording, time = simulator.recording, simulator.time
    recorded, simulated = recorded_figures(recording), figures_of(simulator.run(simulator.config))
    error = {name: _percent(getattr(simulated, name), getattr(recorded, name)) for name in TIMES}
    spread = simulator.spread()
    bars = {name: round(max(abs(error[name]), spread[name]), 1) for name in TIMES}
    return WhatIf(
        capture=capture,
        model=simulator.info.name,
        numerics=simulator.info.numerics,
        num_requests=len(recording.requests),
        step_ns={name: round(weight, 3) for name, weight in zip(FEATURES, time.weights.tolist(), strict=True)},
        step_error_mean_percent=round(100 * time.mean_error, 1),
        step_error_median_percent=round(100 * time.median_error, 1),
        slow_steps_percent=round(100 * float((time.ratios > 3).mean()), 2),
        recorded=recorded,
        simulated=simulated,
        simulated_error=error,
        spread=spread,
        changes=[
            _changed(change, simulator.run(config), simulated, bars)
            for change, config in zip(changes, configs, strict=True)
        ],
    )


def _changed(change: Change, run: Simulated, base: Figures, bars: dict[str, float]) -> Changed:
    figures = figures_of(run)
    return Changed(
        change,
        figures,
        {name: _percent(getattr(figures, name), getattr(base, name)) for name in TIMES},
        bars,
        round(100 * run.num_uncovered_steps / max(1, run.num_steps), 1),
        run.num_made_up_tokens,
    )


def figures_of(run: Simulated) -> Figures:
    """Return the figures of a simulated run."""
    times = [
        Times(
            one.arrived * _NS,
            one.first_token * _NS if one.first_token else None,
            one.last_token * _NS if one.last_token else None,
            one.ended * _NS if one.ended and not one.was_aborted else None,
            one.num_tokens,
        )
        for one in run.moments
    ]
    counts = (run.num_tokens, run.num_steps, run.num_cached_tokens, run.num_preemptions)
    return _made(latencies(times), (run.end_ns - run.begin_ns) * _NS, counts)


def recorded_figures(recording: Recording) -> Figures:
    """Return the figures of the captured run."""
    times = [
        Times(
            one.received_ns * _NS,
            one.token_times[0] * _NS if one.token_times else None,
            one.token_times[-1] * _NS if one.token_times else None,
            one.ended_ns * _NS if one.ended_ns and not one.aborted_ns else None,
            len(one.token_times),
        )
        for one in recording.requests
    ]
    counts = (
        recording.num_tokens,
        len(recording.durations),
        recording.num_cached_tokens,
        recording.num_preemptions,
    )
    return _made(latencies(times), (recording.end_ns - recording.begin_ns) * _NS, counts)


def _made(found: Latencies, seconds: float, counts: tuple[int, int, int, int]) -> Figures:
    ttft, tpot, e2e = found.ttft_ms, found.tpot_ms, found.e2e_ms
    return Figures(
        round(counts[0] / max(seconds, _NS), 1),
        ttft.mean if ttft else None,
        ttft.p99 if ttft else None,
        tpot.mean if tpot else None,
        e2e.mean if e2e else None,
        e2e.p99 if e2e else None,
        *counts,
    )


def _percent(value: float | None, base: float | None) -> float:
    """How much larger a value is than its base, in percent; 0 if a figure is missing."""
    return round(100 * (value / base - 1), 1) if value is not None and base else 0.0
