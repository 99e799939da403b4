"""`engine-core simulate TRACE --replicas N`: a fleet of engines in virtual time; the smallest one that holds an SLO."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from core.capture.file import CaptureFile
from core.execution.executor import ModelInfo
from core.executors.fake import create
from core.executors.fake_options import read_fake_options, with_fake_options
from core.process.resolve import resolve, resolve_costs
from frontend.fleet.placement import POLICIES
from ipc.errors import ConfigError
from ipc.options.given_options import config_from_options
from ipc.options.resolved import ResolvedConfig
from tools.commands.replay.fails_when import FailsWhen, Value
from tools.commands.replay.latency import latencies
from tools.commands.replay.what_if.recording import read_recording
from tools.commands.replay.what_if.step_time import FEATURES, StepTime, fit
from tools.flags.options import ArgumentParser, add_engine_options, engine_options
from tools.lab.simulate.fleet import FleetRun, simulate_fleet
from tools.lab.traces.formats import read_trace
from tools.lab.traces.row import Making
from tools.lab.traces.workload import Workload, make_workload

EXIT_MISSED = 1
MOST_REPLICAS = 4096
_OPTIONS = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "num_blocks_override": 4096}
_EPILOG = """\
Lengths are scaled as `engine-core traces` does. Step times are those of --step-model, fitted to a capture's own steps,
otherwise step-ms + token-us * tokens computed + context-ns * tokens of KV cache that decoding rows read.

--slo names ttft_mean, ttft_p99, tpot_mean, e2e_mean, e2e_p99 (milliseconds), tokens_per_s, preemptions, unfinished.

exit status: 0, 1 the SLO is missed, or cannot be held with the allowed number of replicas, 2 usage"""


def main(arguments: Sequence[str]) -> int:
    """Simulate, print a JSON line for each run; return the exit status. Errors: ConfigError, CaptureFileError."""
    parsed = _parser().parse_args(arguments)
    slo = None if parsed.slo is None else FailsWhen(parsed.slo)
    if parsed.find and slo is None:
        raise ConfigError("--find replicas needs --slo, which the fleet must hold")
    if not 1 <= parsed.replicas <= MOST_REPLICAS:
        raise ConfigError(f"--replicas must be from 1 to {MOST_REPLICAS}; got {parsed.replicas}")
    config = _config(engine_options(parsed), parsed)
    making = Making(parsed.rate, parsed.burstiness, parsed.seed, parsed.tokenizer)
    workload = make_workload(
        read_trace(parsed.file, parsed.rows, making),
        max_tokens=parsed.max_tokens,
        time_scale=parsed.time_scale,
        num_clients=1,
        vocab_size=read_fake_options(config).vocab_size,
    )
    simulator = FleetSimulator(config, workload, _step_time(parsed), parsed.route, info=create(config).info, slo=slo)
    if not parsed.find:
        return 0 if simulator.holds(parsed.replicas) else EXIT_MISSED
    return EXIT_MISSED if find_replicas(simulator, parsed.replicas) is None else 0


class FleetSimulator:
    """Runs of one workload on fleets of several sizes."""

    def __init__(
        self,
        config: ResolvedConfig,
        workload: Workload,
        step_time: StepTime,
        route: str,
        *,
        info: ModelInfo,
        slo: FailsWhen | None,
    ) -> None:
        self._config, self._workload, self._time, self._route, self._slo = config, workload, step_time, route, slo
        self._info = info

    def holds(self, num_replicas: int) -> bool:
        """Simulate a fleet, print its record, and return whether all requests ended and the SLO is held."""
        begin = time.perf_counter()
        run = simulate_fleet(
            self._config,
            self._info,
            self._workload.requests,
            self._time,
            num_replicas=num_replicas,
            route=self._route,
        )
        values = values_of(run)
        holds = not values["unfinished"] and (self._slo is None or self._slo.holds(values))
        shares = np.bincount(run.replicas, minlength=num_replicas)
        record = {
            "trace": self._workload.trace.name,
            "replicas": num_replicas,
            "route": self._route,
            "requests": len(run.arrivals),
            **{name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()},
            "cached_tokens": run.num_cached_tokens,
            "most_requests_of_one": int(shares.max()),
            "virtual_s": round(run.end_ns / 1e9, 1),
            "calls": run.num_calls,
            "seconds": round(time.perf_counter() - begin, 1),
            "slo": None if self._slo is None else self._slo.text,
            "holds": holds,
        }
        sys.stdout.write(json.dumps(record) + "\n")
        sys.stdout.flush()
        return holds


def values_of(run: FleetRun) -> dict[str, Value]:
    """Return the figures that an SLO may name."""
    found = latencies(run.times())
    seconds = max(1e-9, (run.end_ns - int(run.arrivals[0])) / 1e9)
    return {
        "ttft_mean": found.ttft_ms.mean if found.ttft_ms else None,
        "ttft_p99": found.ttft_ms.p99 if found.ttft_ms else None,
        "tpot_mean": found.tpot_ms.mean if found.tpot_ms else None,
        "e2e_mean": found.e2e_ms.mean if found.e2e_ms else None,
        "e2e_p99": found.e2e_ms.p99 if found.e2e_ms else None,
        "tokens_per_s": int(run.num_tokens.sum()) / seconds,
        "preemptions": run.num_preemptions,
        "unfinished": int((run.ends < 0).sum()),
    }


def find_replicas(simulator: FleetSimulator, most: int) -> int | None:
    """Print and return the smallest number of replicas up to `most` that holds the SLO; None: there is none.

    More replicas are assumed to be no worse than fewer.
    """
    misses, holds = 0, 1
    while holds < most and not simulator.holds(holds):
        misses, holds = holds, min(most, 2 * holds)
    if holds == most and not simulator.holds(most):
        print(json.dumps({"found": None, "most": most}))
        return None
    while holds - misses > 1:
        middle = (misses + holds) // 2
        if simulator.holds(middle):
            holds = middle
        else:
            misses = middle
    print(json.dumps({"found": holds, "most": most}))
    return holds


def _step_time(parsed: argparse.Namespace) -> StepTime:
    """Return the time of steps: fitted to a capture, or from round numbers. Errors: CaptureFileError."""
    if parsed.step_model is not None:
        recording = read_recording(CaptureFile(parsed.step_model))
        return fit(recording.features, recording.durations)
    token_ns, context_ns = parsed.token_us * 1e3, parsed.context_ns
    weights = np.array([parsed.step_ms * 1e6, token_ns, token_ns, context_ns, 0, 0, 0, 80_000.0])
    return StepTime(weights, np.full(len(FEATURES), 2**62), np.ones(1), 0.0, 0.0)


def _config(options: dict[str, Any], parsed: argparse.Namespace) -> ResolvedConfig:
    if options.get("executor", "fake") != "fake" or "model" in options or "max_model_len" in options:
        raise ConfigError(
            "a simulation has no model, and --max-tokens sets max_model_len: leave out --executor, --model and "
            "--max-model-len"
        )
    fixed = {"executor": "fake", "max_model_len": parsed.max_tokens}
    costs = {"recompute_ns_per_token": max(1, round(parsed.token_us * 1e3)), "swap_ns_per_block": 80_000}
    config = config_from_options(**{**_OPTIONS, **costs, **options, **fixed, "async_scheduling": False})
    config = with_fake_options(config, max_model_len=parsed.max_tokens)
    executor = create(config)
    blocks_in = executor.determine_num_available_blocks
    resolved = resolve(config, executor.info, blocks_in, total_memory_bytes=2**36, num_cpus=1)
    return resolve_costs(resolved, config, executor.measure_costs, executor.measure_steps)


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="engine-core simulate",
        usage="engine-core simulate TRACE --replicas N [--slo EXPR [--find replicas]] [OPTION ...]",
        description="Run a trace, or a capture's requests, on a fleet of engines in virtual time, each with the real "
        "scheduler.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "file", type=Path, metavar="TRACE", help="a trace in any format that `engine-core traces` reads"
    )
    parser.add_argument(
        "--replicas", type=int, default=1, metavar="N", help="number of engines; with --find the largest number"
    )
    parser.add_argument(
        "--route",
        choices=tuple(POLICIES),
        default="least_loaded",
        help="which replica gets a request; default: least_loaded",
    )
    parser.add_argument("--slo", metavar="EXPR", help="condition that the fleet must meet, such as 'ttft_p99 < 2000'")
    parser.add_argument("--find", choices=("replicas",), help="find the smallest number that holds the SLO")
    parser.add_argument("--step-model", metavar="FILE", help="fit the step time to this capture")
    parser.add_argument("--rows", type=int, metavar="N", help="the first N rows of the trace; default: all")
    parser.add_argument("--max-tokens", type=int, default=8192, metavar="N", help="longest request; default: 8192")
    parser.add_argument(
        "--time-scale", type=float, default=1.0, metavar="X", help="factor on arrival times; default: 1"
    )
    parser.add_argument("--rate", type=float, metavar="X", help="for ShareGPT: requests a second")
    parser.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="X",
        help="burstiness of ShareGPT's arrivals: 1 = Poisson; default: 1",
    )
    parser.add_argument("--tokenizer", metavar="FOLDER", help="for ShareGPT: tokenizer that measures its texts")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of generated requests; default: 0")
    parser.add_argument(
        "--step-ms", type=float, default=10.0, metavar="X", help="fixed time of every step; default: 10"
    )
    parser.add_argument(
        "--token-us", type=float, default=50.0, metavar="X", help="time of a computed token; default: 50"
    )
    parser.add_argument(
        "--context-ns",
        type=float,
        default=70.0,
        metavar="X",
        help="time of a token that a decoding row reads; default: 70",
    )
    add_engine_options(parser)
    return parser
