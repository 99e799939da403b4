"""`engine-core forecast CAPTURE --model M`: recorded requests as they would run here, with error bars."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from core.capture.bounds import bounded_memory
from core.capture.file import CaptureFile
from core.model_files.inspection import Needs, inspect_model
from ipc.errors import ConfigError
from ipc.files.model_files import resolve_model
from ipc.options.block_stores import NO_STORE
from ipc.options.given_options import config_from_options
from tools.commands.http import check_installed
from tools.commands.replay.fails_when import FailsWhen
from tools.commands.replay.rerun import replay_config
from tools.commands.replay.what_if.recording import read_recording
from tools.flags.options import ArgumentParser, add_engine_options, engine_options
from tools.lab.forecast.forecast import NUM_RUNS, Engine, fitting, forecast, measure, observed, requests_of
from tools.lab.forecast.page import Report, page
from tools.lab.forecast.rehearsal import busiest, hold, rehearsal_of
from tools.lab.simulate.__main__ import EXIT_MISSED, MOST_REPLICAS, FleetSimulator, find_replicas
from tools.lab.traces.formats import read_trace
from tools.lab.traces.row import Trace
from tools.lab.traces.workload import make_workload

_MOST_RUNS = 1000
_EPILOG = """\
The steps' durations are measured: the busiest stretch of the capture runs here first, on an engine with these options.
The result is kept in --rehearsals. Or give a measured run: --step-model RUN.cap, recorded with `engine-core serve
--capture`, and --observed RUN.jsonl, the same run recorded with `engine-core record`.
--slo names ttft_mean, ttft_p99, tpot_mean, e2e_mean, e2e_p99 (milliseconds), tokens_per_s, preemptions, unfinished.
exit status: 0, 1 no allowed number of replicas holds the SLO, 2 usage"""


def main(arguments: Sequence[str]) -> int:
    """Forecast, write the page and print the table; return the exit status. Errors: ConfigError, CaptureFileError."""
    parsed = _parser().parse_args(arguments)
    options = engine_options(parsed)
    _check(parsed, options)
    slo = None if parsed.slo is None else FailsWhen(parsed.slo)
    trace = read_trace(parsed.file, parsed.rows)
    given = None if parsed.step_model is None else (parsed.step_model, parsed.observed)
    run, traffic = given or _rehearsed(parsed, options, trace)
    has_model = given is None and options.get("executor") != "fake"
    needs = inspect_model(resolve_model(options.get("model"))).needs if has_model else None
    with bounded_memory(str(run)):
        return _forecast(parsed, slo, trace, _engine(CaptureFile(run), traffic, parsed.runs), needs)


def _forecast(
    parsed: argparse.Namespace, slo: FailsWhen | None, trace: Trace, engine: Engine, needs: Needs | None
) -> int:
    """Simulate, write and print; return the exit status."""
    trace, num_too_long = fitting(trace, engine.config)
    if not trace.rows:
        raise ConfigError(f"every request of {parsed.file} is longer than max_model_len {engine.config.max_model_len}")
    found = forecast(engine, requests_of(trace, engine.config, engine.info), parsed.runs)
    replicas = None if slo is None else _find(engine, trace, slo, parsed.replicas) or 0
    report = Report(trace, observed(trace), found, num_too_long, parsed.slo, replicas, needs)
    _write(parsed.output or f"{parsed.file}.html", page(report))
    _print(report)
    return EXIT_MISSED if replicas == 0 else 0


def _check(parsed: argparse.Namespace, options: dict[str, Any]) -> None:
    if parsed.step_model is not None and options:
        raise ConfigError("--step-model's engine has its options already: leave out --model and the engine's options")
    if parsed.observed is not None and parsed.step_model is None:
        raise ConfigError("--observed is what clients saw of --step-model's run: give both")
    if (parsed.slo is None) != (parsed.find is None):
        raise ConfigError("--find replicas and --slo belong together")
    for name, most in (("runs", _MOST_RUNS), ("replicas", MOST_REPLICAS), ("rehearse_seconds", 3600)):
        if not 1 <= getattr(parsed, name) <= most:
            raise ConfigError(f"--{name.replace('_', '-')} must be from 1 to {most}; got {getattr(parsed, name)}")


def _rehearsed(parsed: argparse.Namespace, options: dict[str, Any], trace: Trace) -> tuple[Path, Path]:
    """Return the files of a run of the engine with these options, held here now or before."""
    check_installed()
    config = config_from_options(**options)
    if config.executor != "fake":
        config = msgspec.structs.replace(config, model=str(resolve_model(config.model)))
    stretch = busiest(trace, parsed.rehearse_seconds)
    rehearsal = rehearsal_of(Path(parsed.rehearsals).expanduser(), config, stretch)
    if not rehearsal.is_there:
        seconds, count = stretch.rows[-1].arrival_s, len(stretch.rows)
        print(
            f"engine-core: measuring {count} requests of {seconds:.0f} s on this machine", file=sys.stderr, flush=True
        )
        hold(rehearsal, config, stretch)
    return rehearsal.capture, rehearsal.traffic


def _engine(file: CaptureFile, traffic: Path | None, num_runs: int) -> Engine:
    """Return the engine of a capture; its blocks in files are left out of the simulations.

    num_runs: as many as the forecast's, because the spread of fewer is smaller.
    """
    if file.begins_inside:
        raise ConfigError(f"{file.path} begins inside a run: a forecast needs a capture from the engine's start")
    config = msgspec.structs.replace(replay_config(file.header), **NO_STORE)
    recording = read_recording(file)
    if not recording.requests:
        raise ConfigError(f"{file.path} has no requests")
    seen = None if traffic is None else observed(read_trace(traffic))
    return measure(config, file.header.model, recording, seen, num_runs=num_runs)


def _find(engine: Engine, trace: Trace, slo: FailsWhen, most: int) -> int | None:
    """Return the smallest number of replicas that holds the SLO."""
    workload = make_workload(
        trace,
        max_tokens=engine.config.max_model_len,
        time_scale=1.0,
        num_clients=1,
        vocab_size=engine.info.vocab_size,
    )
    weights = engine.time.weights.copy()
    weights[0] += engine.gap_ns
    step_time = engine.time._replace(weights=weights)
    simulator = FleetSimulator(engine.config, workload, step_time, "least_loaded", info=engine.info, slo=slo)
    return find_replicas(simulator, most)


def _write(path: str, text: str) -> None:
    try:
        with Path(path).open("x", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}") from None


def _print(report: Report) -> None:
    table = Table(title=report.trace.name, title_justify="left")
    table.add_column("")
    for name in ("observed there", "forecast here", "bar"):
        table.add_column(name, justify="right")
    for line in report.lines():
        table.add_row(*line)
    console = Console(file=sys.stdout, highlight=False, width=110)
    console.print(table)
    for fact in report.facts():
        print(fact)


def _parser() -> argparse.ArgumentParser:
    cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "engine-core", "rehearsals")
    parser = ArgumentParser(
        prog="engine-core forecast",
        usage="engine-core forecast CAPTURE [--model M | --step-model RUN.cap] [-o FILE.html] [OPTION ...]",
        description="Predict recorded requests on an engine: times, throughput, memory and preemptions, with error "
        "bars,\nnext to what was observed there.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "file", type=Path, metavar="CAPTURE", help="of `engine-core record`, or any trace `engine-core traces` reads"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="the page; it must not exist; default: CAPTURE.html")
    parser.add_argument("--rows", type=int, metavar="N", help="the first N requests; default: all")
    parser.add_argument("--runs", type=int, default=NUM_RUNS, metavar="N", help="simulations; default: %(default)s")
    parser.add_argument(
        "--rehearse-seconds", type=float, default=60.0, metavar="X", help="the stretch that runs here; default: 60"
    )
    parser.add_argument("--rehearsals", default=cache, metavar="FOLDER", help="of measured runs; default: %(default)s")
    parser.add_argument("--step-model", type=Path, metavar="RUN.cap", help="a measured run, instead of a rehearsal")
    parser.add_argument("--observed", type=Path, metavar="RUN.jsonl", help="what clients saw of --step-model's run")
    parser.add_argument("--slo", metavar="EXPR", help="condition that the engines must meet, as 'ttft_p99 < 2000'")
    parser.add_argument("--find", choices=("replicas",), help="find the smallest number that holds the SLO")
    parser.add_argument("--replicas", type=int, default=64, metavar="N", help="most for --find; default: 64")
    add_engine_options(parser)
    return parser
