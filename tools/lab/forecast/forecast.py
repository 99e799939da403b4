"""Forecast: recorded requests on an engine that was measured, simulated many times, with error bars.

The steps' durations are fitted to a measured run (tools/commands/replay/what_if/step_time.py). Each simulation draws
the machine's pace from that of the measured run, in stretches of time; and the delays between engine and client in
stretches of requests. What the simulations do not know (a fit that is
no law, a machine that changes) is seen in the measured run itself: it is simulated too, and the distance between its
prediction and what its clients saw widens the bars (split conformal prediction, Vovk et al., 2005).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from core.execution.executor import ModelInfo
from ipc.options.resolved import ResolvedConfig
from ipc.params.sampling_params import SamplingParams
from ipc.tables.arrays import Doubles
from ipc.wire.messages import AddRequest
from tools.commands.replay.what_if.recording import Recorded, Recording, unmeasured
from tools.commands.replay.what_if.simulation import Simulated, simulate
from tools.commands.replay.what_if.step_time import StepTime, fit
from tools.lab.traces.row import Row, Trace
from tools.lab.traces.workload import make_workload

NUM_RUNS = 12
COVERED = 0.9  # share of the windows that the bars are meant to hold
WINDOW = 10  # requests
_STRETCH = 64  # consecutive requests whose delays are drawn together
_LEAST = 0.05  # of a value: the smallest half bar before it is widened
_BEGIN_NS = 10**9  # of the simulated clock: 0 means never
_NS = 1e-9
#: Figures of a whole run: milliseconds, and tokens a second.
FIGURES = (
    "ttft_mean",
    "ttft_p50",
    "ttft_p90",
    "ttft_p99",
    "tpot_mean",
    "tpot_p99",
    "e2e_mean",
    "e2e_p99",
    "tokens_per_s",
)


class Outcome(NamedTuple):
    """The times of some requests in order of arrival, in seconds; NaN = it has none. Arrays are float64 [requests]."""

    arrival: Doubles
    ttft: Doubles
    tpot: Doubles
    e2e: Doubles
    num_tokens: Doubles

    def part(self, begin: int, end: int) -> "Outcome":
        """Return the requests from `begin` to `end`."""
        return Outcome(*(column[begin:end] for column in self))

    def figures(self) -> dict[str, float]:
        """Return FIGURES; NaN: no request has such a time."""
        found = {}
        for name, values in (("ttft", self.ttft), ("tpot", self.tpot), ("e2e", self.e2e)):
            known = values[np.isfinite(values)] * 1e3
            found[f"{name}_mean"] = float(known.mean()) if len(known) else np.nan
            for share in (50, 90, 99):
                found[f"{name}_p{share}"] = float(np.percentile(known, share)) if len(known) else np.nan
        ends = self.arrival + np.where(np.isfinite(self.e2e), self.e2e, 0)
        seconds = float(ends.max() - self.arrival.min()) if len(ends) else 0.0
        found["tokens_per_s"] = float(self.num_tokens.sum()) / seconds if seconds else np.nan
        return {name: found[name] for name in FIGURES}


class Engine(NamedTuple):
    """An engine that was measured.

    delays: for each measured request, the seconds from the engine's first and last token to the client's, float64
    [requests, 2]. widen: by figure of a window (ttft, tpot), the factor on its bars. errors: by figure of a run, the
    prediction's relative error on the measured run.
    """

    config: ResolvedConfig
    info: ModelInfo
    time: StepTime
    gap_ns: int  # between steps
    empty_ns: int
    delays: Doubles
    widen: dict[str, float]
    errors: dict[str, float]
    num_windows: int  # of the measured run


class Bars(NamedTuple):
    """A figure of each window, float64 [windows]: the prediction, and the ends of its bar."""

    middle: Doubles
    low: Doubles
    high: Doubles

    def covers(self, observed: Doubles) -> tuple[int, int]:
        """Return (windows whose observed value is within the bar, windows that have one)."""
        known = np.isfinite(observed) & np.isfinite(self.middle)
        inside = known & (observed >= self.low) & (observed <= self.high)
        return int(inside.sum()), int(known.sum())


class Run(NamedTuple):
    """One simulation: the requests' times, and what the engine did."""

    outcome: Outcome
    num_preemptions: int
    num_cached_tokens: int
    max_used_blocks: int
    uncovered: float  # share of steps larger than any that was measured


class Forecast(NamedTuple):
    """The simulations of some requests on one engine."""

    engine: Engine
    runs: list[Run]

    def figures(self) -> dict[str, tuple[float, float, float]]:
        """Return (middle, low, high) of each of FIGURES.

        The bar is the larger one of the runs' spread and of the error on the measured run.
        """
        values = [run.outcome.figures() for run in self.runs]
        found = {}
        for name in FIGURES:
            column = np.array([one[name] for one in values])
            middle = float(column.mean())
            error = self.engine.errors.get(name, 0.0)
            half = max(_half(column[:, None])[0], abs(error) * middle if np.isfinite(error) else 0.0)
            found[name] = (middle, max(0.0, middle - half), middle + half)
        return found

    def bars(self, name: str, begin: int = 0, end: int | None = None) -> Bars:
        """Return the bars of the windows of requests from `begin` to `end`. name: ttft or tpot."""
        return _bars(self.runs, name, self.engine.widen[name], begin, end)


def windows(values: Doubles) -> Doubles:
    """Return the mean of each WINDOW of requests; a smaller rest is part of the last one. NaN: none has a value."""
    count = max(1, len(values) // WINDOW)
    edges = [*range(0, count * WINDOW, WINDOW), len(values)]
    parts = [values[begin:end] for begin, end in pairwise(edges)]
    return np.array([np.nanmean(part) if np.isfinite(part).any() else np.nan for part in parts])


def _bars(runs: Sequence[Run], name: str, factor: float, begin: int, end: int | None) -> Bars:
    values = np.stack([windows(getattr(run.outcome, name)[begin:end]) for run in runs])
    middle = values.mean(axis=0)
    half = factor * (_half(values) + _LEAST * middle)
    return Bars(middle, np.maximum(0.0, middle - half), middle + half)


def _half(values: Doubles) -> Doubles:
    """Return half the range of COVERED of the runs: float64 [runs, n] -> [n]."""
    tail = 50 * (1 - COVERED)
    low, high = np.percentile(values, [tail, 100 - tail], axis=0)
    half: Doubles = (high - low) / 2
    return half


def measure(
    config: ResolvedConfig,
    info: ModelInfo,
    recording: Recording,
    observed: Outcome | None,
    *,
    num_requests: int | None = None,
    num_runs: int = NUM_RUNS,
) -> Engine:
    """Return what a measured run says of its engine.

    observed: what its clients saw, in order of arrival; None = what the engine recorded. num_requests: use only the
    run's first requests, and the steps up to the next one's arrival; None = all. num_runs: as many as the forecasts'
    will be, because the spread of fewer is smaller.
    """
    count = len(recording.requests) if num_requests is None else num_requests
    until = recording.end_ns if num_requests is None else recording.requests[count].received_ns
    within = recording.begins <= until
    time = fit(recording.features[within], recording.durations[within])
    recorded = _recorded(recording.requests).part(0, count)
    observed = None if observed is None else observed.part(0, count)
    if observed is None or not np.isfinite(observed.ttft).any():
        observed = recorded
    delays = _delays(observed, recorded)
    engine = Engine(config, info, time, recording.gap_ns, recording.empty_ns, delays, {}, {}, 0)
    runs = _simulate(engine, recording.requests, num_runs, recording)
    widen = {name: _factor(runs, name, observed, count) for name in ("ttft", "tpot")}
    parts = [run.outcome.part(0, count).figures() for run in runs]
    seen = observed.figures()
    errors = {name: float(np.mean([one[name] for one in parts])) / seen[name] - 1 for name in FIGURES if seen[name]}
    return engine._replace(widen=widen, errors=errors, num_windows=max(1, count // WINDOW))


def _delays(observed: Outcome, recorded: Outcome) -> Doubles:
    """Return the seconds from the engine's first and last tokens to the clients'.

    The same request has the same place in both. If their numbers differ (some came from elsewhere), the difference of
    the medians is all that is known.
    """
    if len(observed.ttft) != len(recorded.ttft):
        constant = max(0.0, float(np.nanmedian(observed.ttft) - np.nanmedian(recorded.ttft)))
        return np.full((1, 2), constant)
    pairs = np.stack([observed.ttft - recorded.ttft, observed.e2e - recorded.e2e], axis=1)
    pairs = pairs[np.isfinite(pairs).all(axis=1)]
    return np.maximum(pairs, 0.0) if len(pairs) else np.zeros((1, 2))


def _factor(runs: Sequence[Run], name: str, observed: Outcome, count: int) -> float:
    """Return the factor with which COVERED of the measured windows, and one more to come, are within their bars."""
    bars, seen = _bars(runs, name, 1.0, 0, count), windows(getattr(observed, name))
    known = np.isfinite(seen) & np.isfinite(bars.middle)
    if not known.any():
        return 1.0
    scores = np.sort(np.abs(seen - bars.middle)[known] / np.maximum(bars.high - bars.middle, 1e-12)[known])
    place = int(np.ceil(COVERED * (len(scores) + 1))) - 1
    return float(scores[min(place, len(scores) - 1)])


def forecast(engine: Engine, requests: Sequence[Recorded], num_runs: int = NUM_RUNS) -> Forecast:
    """Simulate the requests. Errors: StuckError."""
    return Forecast(engine, _simulate(engine, requests, num_runs, None))


def _simulate(engine: Engine, requests: Sequence[Recorded], num_runs: int, recording: Recording | None) -> list[Run]:
    """Simulate with drawn deviations. recording: the measured run, whose tokens are known; None = they are made up."""
    draw = np.random.default_rng(0)
    recording = recording or unmeasured(requests, engine.gap_ns, engine.empty_ns)
    runs = []
    for _ in range(num_runs):
        pace = engine.time.pace.drawn(draw)
        run = simulate(engine.config, engine.info, recording, engine.time, is_open=True, pace=pace)
        runs.append(_run(run, _drawn(engine.delays, len(run.moments), draw)))
    return runs


def _drawn(measured: Doubles, count: int, draw: np.random.Generator) -> Doubles:
    """Return `count` values of measured ones [n] or [n, 2], drawn in stretches of consecutive ones."""
    size = min(_STRETCH, len(measured))
    firsts = draw.integers(0, len(measured) - size + 1, -(-count // size))
    return np.concatenate([measured[first : first + size] for first in firsts.tolist()])[:count]


def fitting(trace: Trace, config: ResolvedConfig) -> tuple[Trace, int]:
    """Return the rows that the engine takes, and how many are too long for it."""
    fit_rows = [row for row in trace.rows if row.num_input + max(1, row.num_output) <= config.max_model_len]
    return trace._replace(rows=fit_rows), len(trace.rows) - len(fit_rows)


def requests_of(trace: Trace, config: ResolvedConfig, info: ModelInfo) -> list[Recorded]:
    """Return the rows as requests with made-up tokens, which share what the rows share.

    A cancelled one is aborted after as many tokens as its client had.
    """
    workload = make_workload(
        trace, max_tokens=config.max_model_len, time_scale=1.0, num_clients=1, vocab_size=info.vocab_size
    )
    return [
        _request(row, one.message, _BEGIN_NS + one.arrival_ns, config)
        for row, one in zip(trace.rows, workload.requests, strict=True)
    ]


def _request(row: Row, message: AddRequest, arrival_ns: int, config: ResolvedConfig) -> Recorded:
    most = config.max_model_len - row.num_input if row.is_cancelled else max(1, row.num_output)
    params = SamplingParams(max_tokens=most, ignore_eos=True, temperature=0)
    message = AddRequest(message.number, message.prompt_token_ids, params, 0)
    left = row.end_s if row.end_s is not None else row.ttft_s or 0.0
    aborted_ns = arrival_ns + max(1, round(left / _NS)) if row.is_cancelled else 0
    return Recorded(1, message, arrival_ns, [[]], [0] * row.num_output, aborted_ns=aborted_ns)


def observed(trace: Trace) -> Outcome:
    """Return what the clients saw when the trace was recorded."""
    rows = trace.rows
    ttft, end = _column([row.ttft_s for row in rows]), _column([row.end_s for row in rows])
    counts = np.array([row.num_output for row in rows], np.float64)
    return _outcome(np.array([row.arrival_s for row in rows]), ttft, end, counts)


def _recorded(requests: Sequence[Recorded]) -> Outcome:
    """Return what the engine recorded of its requests."""
    arrival = np.array([one.received_ns for one in requests], np.float64) * _NS
    first = _column([one.token_times[0] * _NS if one.token_times else None for one in requests])
    last = _column(
        [
            one.token_times[-1] * _NS if one.ended_ns and not one.aborted_ns and one.token_times else None
            for one in requests
        ]
    )
    return _outcome(
        arrival, first - arrival, last - arrival, np.array([len(one.token_times) for one in requests], np.float64)
    )


def _run(run: Simulated, delays: Doubles) -> Run:
    moments = run.moments
    arrival = np.array([one.arrived for one in moments], np.float64) * _NS
    first = _column([one.first_token * _NS if one.first_token else None for one in moments])
    last = _column(
        [one.last_token * _NS if one.ended and one.last_token and not one.was_aborted else None for one in moments]
    )
    counts = np.array([one.num_tokens for one in moments], np.float64)
    outcome = _outcome(arrival, first - arrival + delays[:, 0], last - arrival + delays[:, 1], counts)
    uncovered = run.num_uncovered_steps / max(1, run.num_steps)
    return Run(outcome, run.num_preemptions, run.num_cached_tokens, run.max_used_blocks, uncovered)


def _outcome(arrival: Doubles, ttft: Doubles, end: Doubles, counts: Doubles) -> Outcome:
    tpot = np.where(counts > 1, (end - ttft) / np.maximum(counts - 1, 1), np.nan)
    return Outcome(arrival - (arrival[0] if len(arrival) else 0.0), ttft, tpot, end, counts)


def _column(values: Sequence[float | None]) -> Doubles:
    return np.array([np.nan if one is None else one for one in values], np.float64)
