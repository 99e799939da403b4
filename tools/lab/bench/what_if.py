"""The error of `engine-core replay --what-if`: a Poisson load run live, and predicted from one capture.

The same requests at the same times go to five engines, one after another: twice with one configuration, and once with
fewer rows, a smaller budget, another policy. All figures are the engines' own, from their captures. Predictions from
the first capture are compared with the results of the other engines. The arrival rate is measured first, so that the
machine is busy but not overloaded.
"""

import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from core.capture.file import CaptureFile
from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from frontend.engine.process import EngineProcess
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from ipc.version import NAME, VERSION
from tools.commands.replay.rerun import replay_config
from tools.commands.replay.what_if.options import Change, changed
from tools.commands.replay.what_if.recording import read_recording
from tools.commands.replay.what_if.report import Figures, Simulator, figures_of, recorded_figures
from tools.commands.replay.what_if.step_time import fit

NUM_REQUESTS = 80
BASE = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "scheduling_policy": "fcfs", "num_blocks_override": 2048}
CHANGES: tuple[Change, ...] = (
    {"max_num_seqs": 4},
    {"max_num_batched_tokens": 64},
    {"scheduling_policy": "priority"},
)
#: Largest error of a figure in percent, for the same configuration and for others.
SAME_PERCENT = {"tokens_per_s": 5.0, "tpot_mean_ms": 5.0, "e2e_mean_ms": 5.0, "ttft_mean_ms": 7.0}
OTHER_PERCENT = 12.0
_SPREADS = 1.5  # or this many times the difference of two real runs
_LOAD = 0.6  # of the tokens that the machine produces if it never waits
_SHARED = 128  # shared first tokens of a third of the prompts
_LONGEST = 728  # prompt
_NUM_PROBES = 24


class Arrival(NamedTuple):
    """A request and when it is sent, in seconds after the first one, at a rate of one a second."""

    after_s: float
    prompt: list[int]
    max_tokens: int
    priority: int


def measure_what_if(config: EngineConfig, *, rep: int, count: int = NUM_REQUESTS) -> Iterator[dict[str, Any]]:
    """Yield a record of the same configuration and one of each change."""
    config = msgspec.structs.replace(config, **BASE)
    arrivals = make_arrivals(count, rep)
    with tempfile.TemporaryDirectory(prefix="engine-core-bench-") as folder:
        rate = _LOAD * _requests_per_s(config, make_arrivals(_NUM_PROBES, rep + 1))
        captures = [
            _run_live(changed(config, change), arrivals, rate, Path(folder) / f"{number}.cap")
            for number, change in enumerate(({}, {}, *CHANGES))
        ]
        yield from records(captures, {"rep": rep, "requests": count, "requests_per_s": round(rate, 3)})


def records(captures: list[CaptureFile], facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the records of captures: of two runs of one configuration, and of one with each of CHANGES."""
    recording = read_recording(captures[0])
    time_of_steps = fit(recording.features, recording.durations)
    header = captures[0].header
    simulator = Simulator(replay_config(header), header.model, recording, time_of_steps, is_open=True)
    live = [recorded_figures(read_recording(capture)) for capture in captures]
    facts = {
        "engine": NAME,
        "version": VERSION,
        "workload": "what-if",
        **facts,
        "model": header.model.name,
        "fit_median_percent": round(100 * time_of_steps.median_error, 1),
    }
    simulated = figures_of(simulator.run(simulator.config))
    same = {name: _compared(name, live[0], simulated, live[1]) for name in SAME_PERCENT}
    yield {**facts, "change": {}, "figures": same, "holds": all(one["holds"] for one in same.values())}
    for change, real in zip(CHANGES, live[2:], strict=True):
        foretold = figures_of(simulator.run(changed(simulator.config, change)))
        found = {name: _compared(name, real, foretold, None) for name in SAME_PERCENT}
        yield {**facts, "change": change, "figures": found, "holds": all(one["holds"] for one in found.values())}


def make_arrivals(count: int, seed: int) -> list[Arrival]:
    """Return requests with Poisson arrivals; a third of the prompts share their beginning."""
    rng, now = random.Random(f"what-if {seed}"), 0.0
    shared = [rng.randrange(100, 10_000) for _ in range(_SHARED)]
    arrivals = []
    for _ in range(count):
        length = min(_LONGEST - _SHARED, max(4, round(rng.lognormvariate(4.2, 0.9))))
        prompt = [rng.randrange(100, 10_000) for _ in range(length)]
        if rng.random() < 1 / 3:
            prompt = shared + prompt
        arrivals.append(Arrival(now, prompt, min(128, max(2, round(rng.lognormvariate(3.2, 0.6)))), rng.randrange(2)))
        now += rng.expovariate(1.0)
    return arrivals


def _requests_per_s(config: EngineConfig, arrivals: list[Arrival]) -> float:
    """Return how many of these requests an engine that has them all at once finishes a second."""
    with EngineProcess(config) as engine:
        _send(engine.address, arrivals[:2], 0.0)  # the first steps of all
        begin = time.monotonic()
        _send(engine.address, arrivals, 0.0)
        return len(arrivals) / (time.monotonic() - begin)


def _run_live(config: EngineConfig, arrivals: list[Arrival], rate: float, path: Path) -> CaptureFile:
    """Send the requests, `rate` of them a second, to a new engine, and return its capture."""
    with EngineProcess(msgspec.structs.replace(config, capture=str(path))) as engine:
        _send(engine.address, arrivals, 1 / rate)
    return CaptureFile(path)


def _send(address: str, arrivals: list[Arrival], scale: float) -> None:
    """Send the requests at their times, scaled, and wait for all answers."""
    client = EngineClient(ZmqTransport(address), name="what-if")
    try:
        begin, numbers = time.monotonic(), list[int]()
        for one in arrivals:
            time.sleep(max(0.0, begin + one.after_s * scale - time.monotonic()))
            params = SamplingParams(max_tokens=one.max_tokens, ignore_eos=True, temperature=0.0)
            numbers.append(client.submit(one.prompt, params, seed=0, priority=one.priority))
        while left := [number for number in numbers if not client.read(number).finish]:
            client.wait(np.array(left), 1.0)
    finally:
        client.close()


def _compared(name: str, real: Figures, foretold: Figures, again: Figures | None) -> dict[str, Any]:
    """Return a figure of a real run, its prediction, and the error; again: the figure of a repeated run."""
    value, error = getattr(real, name), _percent(getattr(foretold, name), getattr(real, name))
    compared = {"real": round(value, 1), "foretold": round(getattr(foretold, name), 1), "error_percent": error}
    if again is None:
        return {**compared, "holds": abs(error) <= OTHER_PERCENT}
    spread = _percent(getattr(again, name), value)
    holds = abs(error) <= max(SAME_PERCENT[name], _SPREADS * abs(spread))
    return {**compared, "again": round(getattr(again, name), 1), "again_percent": spread, "holds": holds}


def _percent(value: float, base: float) -> float:
    return round(100 * (value / base - 1), 1)
