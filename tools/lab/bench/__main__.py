"""`engine-core bench BENCHMARK`: print one JSON line per result; it never fails because of a time."""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ipc.errors import ConfigError
from ipc.machine.cpus import usable_cpus
from ipc.options.config import EngineConfig
from ipc.options.given_options import config_from_options
from ipc.version import NAME, VERSION
from tools.commands.replay.latency import percentile
from tools.flags.options import ArgumentParser, add_engine_options, engine_options
from tools.lab.bench.callers.floods import measure_floods
from tools.lab.bench.callers.hostile import measure_hostile
from tools.lab.bench.callers.http import measure_http
from tools.lab.bench.callers.http_model import measure_http_model
from tools.lab.bench.callers.tenants import measure_tenants
from tools.lab.bench.costs.black_box_cost import measure_black_box
from tools.lab.bench.costs.capture_cost import measure_capture
from tools.lab.bench.costs.metrics_cost import measure_metrics
from tools.lab.bench.costs.recorder_cost import measure_checkpoint, measure_recorder
from tools.lab.bench.costs.scheduler_cost import measure_scheduler
from tools.lab.bench.forecast_error import measure_forecast_error
from tools.lab.bench.images import measure_images
from tools.lab.bench.ipc import measure_ipc
from tools.lab.bench.kv_tiers import measure_kv_tiers
from tools.lab.bench.lora import measure_lora
from tools.lab.bench.pinned_session import measure_pinned_session
from tools.lab.bench.quiet import wait_until_quiet
from tools.lab.bench.restart import measure_restart
from tools.lab.bench.route import measure_route
from tools.lab.bench.runs import Bench, Run
from tools.lab.bench.second_turn import measure_second_turn
from tools.lab.bench.speculation import measure_speculation
from tools.lab.bench.startup import MeasuredStartup, kernel_cache, measure_cleanly
from tools.lab.bench.startup_parts import Parts, has_parts, measure_parts
from tools.lab.bench.swap_in import measure_swap_in
from tools.lab.bench.tiny_model import write_tiny_model
from tools.lab.bench.weights_update import measure_weights_update
from tools.lab.bench.what_if import measure_what_if
from tools.lab.bench.workloads import ID_LOW, ID_SPAN, WORKLOADS, Workload, make_workload, read_workload

#: Workloads of each benchmark without --only and --workload; benchmarks without any start their own engine.
DEFAULTS = {
    "latency": ["lat1", "long"],
    "throughput": ["batch8", "batch32", "prefix"],
    "startup": [],
    "ipc": [],
    "http": [],
    "http-model": [],
    "capture": [],
    "metrics": [],
    "black-box": [],
    "recorder": [],
    "checkpoint": [],
    "what-if": [],
    "restart": [],
    "route": [],
    "hostile": [],
    "floods": [],
    "tenants": [],
    "gemm": [],
    "kernels": [],
    "scheduler": [],
    "step": [],
    "workers": [],
    "speculation": [],
    "structured": [],
    "beam-search": [],
    "lora": [],
    "kv-tiers": [],
    "pinned-session": [],
    "swap-in": [],
    "forecast-error": [],
    "weights-update": [],
    "second-turn": [],
    "images": [],
    "encoder": [],
}
#: Engine options whose defaults differ from the engine's: results name their dtype.
_OPTIONS = {"dtype": "bfloat16"}
#: The same for options of the fake executor: prompts may have any id.
_FAKE_OPTIONS = {"vocab_size": str(ID_LOW + ID_SPAN)}
_OWN_ENGINE: dict[str, Callable[..., Iterable[dict[str, Any]]]] = {
    "ipc": measure_ipc,
    "http": measure_http,
    "http-model": measure_http_model,
    "capture": measure_capture,
    "metrics": measure_metrics,
    "black-box": measure_black_box,
    "recorder": measure_recorder,
    "checkpoint": measure_checkpoint,
    "what-if": measure_what_if,
    "restart": measure_restart,
    "route": measure_route,
    "hostile": measure_hostile,
    "floods": measure_floods,
    "tenants": measure_tenants,
    "scheduler": measure_scheduler,
}
_IN_ROUNDS: dict[str, Callable[..., Iterable[dict[str, Any]]]] = {
    "images": measure_images,
    "lora": measure_lora,
    "kv-tiers": measure_kv_tiers,
    "pinned-session": measure_pinned_session,
    "swap-in": measure_swap_in,
    "weights-update": measure_weights_update,
    "second-turn": measure_second_turn,
}
HOST = "host256"  # runs on a separate engine, with the tiny model


def main(arguments: Sequence[str]) -> int:
    """Run one benchmark and return the exit status. Errors: ConfigError; those of the engine."""
    parsed = _parser().parse_args(arguments)
    options = engine_options(parsed)
    if parsed.connect is not None and options:
        raise ConfigError("--connect measures a running engine, whose options are fixed; leave out the engine options")
    if parsed.connect is None:
        options = _with_defaults(options)
    if not DEFAULTS[parsed.benchmark]:
        _run_own_engine(parsed, options)
        return 0
    workloads = _workloads(parsed)
    if usual := [workload for workload in workloads if workload.name != HOST]:
        _run_workloads(parsed, options, usual, is_first=True)
    if host := [workload for workload in workloads if workload.name == HOST]:
        with tempfile.TemporaryDirectory(prefix="engine-core-bench-") as folder:
            _run_workloads(parsed, _host_options(options, Path(folder)), host, is_first=not usual)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="engine-core bench",
        usage=f"engine-core bench {{{','.join(DEFAULTS)}}} [--model PATH | --connect ADDR] [OPTION ...]",
        description="Measure; prints one JSON line per result.",
    )
    parser.add_argument("benchmark", choices=DEFAULTS)
    names = f"comma-separated; known: {', '.join(WORKLOADS)}"
    parser.add_argument("--only", metavar="NAMES", help=f"only these workloads, {names}")
    parser.add_argument(
        "--workload",
        type=Path,
        action="append",
        metavar="FILE",
        help="a workload of your own, JSON; for forecast-error a trace",
    )
    parser.add_argument(
        "--round", type=int, default=0, metavar="N", help="another N gives other token ids of the same shape"
    )
    parser.add_argument("--id-span", type=int, metavar="N", help=f"token ids from {ID_LOW} to {ID_LOW}+N-1")
    parser.add_argument("--reps", type=int, default=1, metavar="N", help="results per workload; default: 1")
    parser.add_argument("--tries", type=int, default=3, metavar="N", help="runs until one is undisturbed; default: 3")
    parser.add_argument(
        "--quiet-seconds", type=float, default=30.0, metavar="S", help="longest wait for a quiet machine; default: 30"
    )
    parser.add_argument(
        "--rows", type=_parse_rows, default=(1, 8, 32, 512), metavar="N,N", help="for gemm; default: 1,8,32,512"
    )
    parser.add_argument(
        "--kernel-cache",
        choices=("filled", "empty"),
        default="filled",
        help="for startup: the C kernels are cached from an earlier start, or must be built; default: filled",
    )
    parser.add_argument("--connect", metavar="ADDR", help="measure the engine at this address")
    add_engine_options(parser)
    return parser


def _parse_rows(text: str) -> tuple[int, ...]:
    """Parse "1,8" into numbers. Errors: those of argparse."""
    words = text.split(",")
    if not all(word.isascii() and word.isdigit() and 0 < int(word) <= 2**20 for word in words):
        raise argparse.ArgumentTypeError(f"expected numbers of rows from 1 to {2**20}, such as 1,8,32, got {text!r}")
    return tuple(map(int, words))


def _workloads(parsed: argparse.Namespace) -> list[Workload]:
    """Return the workloads to run. Errors: ConfigError."""
    if parsed.reps < 1 or parsed.tries < 1 or parsed.quiet_seconds < 0:
        raise ConfigError("--reps and --tries must be at least 1, --quiet-seconds at least 0")
    if parsed.id_span is not None and parsed.id_span < 1:
        raise ConfigError(f"--id-span must be at least 1; got {parsed.id_span}")
    files = [read_workload(path) for path in parsed.workload or ()]
    if parsed.only is not None:
        return [*map(make_workload, parsed.only.split(",")), *files]
    return files or [make_workload(name) for name in DEFAULTS[parsed.benchmark]]


def _run_workloads(
    parsed: argparse.Namespace, options: dict[str, Any], workloads: Sequence[Workload], *, is_first: bool
) -> None:
    if parsed.id_span is not None:
        workloads = [msgspec.structs.replace(workload, id_span=parsed.id_span) for workload in workloads]
    id_span = min(workload.id_span for workload in workloads)
    with Bench(
        options,
        connect=parsed.connect,
        tries=parsed.tries,
        quiet_seconds=parsed.quiet_seconds,
        id_span=id_span,
        is_first=is_first,
    ) as bench:
        for rep in range(parsed.reps):
            for workload in workloads:
                run = bench.run_cleanly(workload, parsed.round)
                print_record(run_record(bench, run, round_=parsed.round, rep=rep))


def _run_own_engine(parsed: argparse.Namespace, options: dict[str, Any]) -> None:
    if parsed.benchmark == "speculation" and parsed.connect is None and not parsed.workload:
        names = parsed.only.split(",") if parsed.only else []
        for record in measure_speculation(options, rounds=parsed.reps, names=names):
            print_record(record)
        return
    if parsed.benchmark == "forecast-error" and parsed.connect is None and parsed.only is None:
        for record in measure_forecast_error(options, rounds=parsed.reps, files=parsed.workload or ()):
            print_record(record)
        return
    if parsed.connect is not None or parsed.only is not None or parsed.workload:
        raise ConfigError(
            f"{parsed.benchmark} starts its own engine and has no workload: leave out --connect, --only, --workload"
        )
    if parsed.benchmark == "startup":
        _run_startup(parsed, options)
        return
    if parsed.benchmark == "beam-search":
        from tools.lab.bench.beam_search import measure_beam_search

        for record in measure_beam_search(options, rounds=parsed.reps):
            print_record(record)
        return
    if parsed.benchmark == "encoder":
        from tools.lab.bench.encoder import measure_encoder

        for record in measure_encoder(options, rounds=parsed.reps):
            print_record(record)
        return
    if (in_rounds := _IN_ROUNDS.get(parsed.benchmark)) is not None:
        for record in in_rounds(options, rounds=parsed.reps):
            print_record(record)
        return
    if parsed.benchmark in ("gemm", "kernels", "step", "structured", "workers"):
        _run_kernels(parsed, options)
        return
    measure = _OWN_ENGINE[parsed.benchmark]
    own = {} if parsed.benchmark in ("http-model", "what-if") else {"executor": "fake", "max_num_seqs": 256}
    config = config_from_options(**_with_defaults({**own, **options}))
    for rep in range(parsed.reps):
        wait_until_quiet(parsed.quiet_seconds)
        for record in measure(config, rep=rep):
            print_record(record)


def _with_defaults(options: dict[str, Any]) -> dict[str, Any]:
    options = {**_OPTIONS, **options}
    if options.get("executor") != "fake":
        return options
    return {**options, "executor_options": _FAKE_OPTIONS | options.get("executor_options", {})}


def _run_startup(parsed: argparse.Namespace, options: dict[str, Any]) -> None:
    config = config_from_options(**options)
    threads, has_kernels = config.threads or usable_cpus(), parsed.kernel_cache == "filled"
    for rep in range(parsed.reps):
        measured = measure_cleanly(
            config, tries=parsed.tries, quiet_seconds=parsed.quiet_seconds, has_kernels=has_kernels
        )
        with kernel_cache(has_kernels) as environment:
            parts = measure_parts(config, environment) if has_parts(config) else {}
        print_record(startup_record(config, threads, measured, parts, kernel_cache=parsed.kernel_cache, rep=rep))


def _run_kernels(parsed: argparse.Namespace, options: dict[str, Any]) -> None:
    config = config_from_options(**options)
    for rep in range(parsed.reps):
        wait_until_quiet(parsed.quiet_seconds)
        for record in _kernel_records(parsed, config, rep):
            print_record(record)


def _kernel_records(parsed: argparse.Namespace, config: EngineConfig, rep: int) -> Iterator[dict[str, Any]]:
    # Imported here: they need torch, which takes seconds.
    if parsed.benchmark == "structured":
        from tools.lab.bench.structured import measure_structured

        return measure_structured(config, rep)
    if parsed.benchmark == "gemm":
        from tools.lab.bench.gemm import measure_gemm

        return measure_gemm(config, parsed.rows, rep)
    if parsed.benchmark == "workers":
        from tools.lab.bench.workers import measure_workers

        return measure_workers(config, rep)
    if parsed.benchmark == "step":
        from tools.lab.bench.step import measure_step

        return measure_step(config, rep)
    if config.device == "cuda":
        from tools.lab.bench.gpu.gpu_kernels import measure_gpu_kernels

        return measure_gpu_kernels(config, rep)
    from tools.lab.bench.kernels import measure_kernels

    return measure_kernels(config, rep)


def _host_options(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return options for the tiny model and for all requests at once; given options have priority."""
    if options.get("executor") != "fake" and "model" not in options:
        write_tiny_model(folder)
        options = {**options, "model": str(folder)}
    return {"max_num_seqs": 256, **options}


# One JSON object a line for each result.
#
# Its fields are those of the other engines' runners, so that lines can be compared.


_NOISY_SHARE = 0.08  # share of the wall time; if other processes take more CPU time, the result is marked


def print_record(record: Mapping[str, Any]) -> None:
    """Print one record as a line of JSON, with the CPU's name."""
    sys.stdout.write(json.dumps({**record, "cpu": cpu_name()}) + "\n")
    sys.stdout.flush()


def run_record(bench: Bench, run: Run, *, round_: int, rep: int) -> dict[str, Any]:
    """Return throughput and latencies of one run. TTFT counts from the moment all requests were submitted."""
    times = run.times
    num_input = run.workload.num_prompt_tokens
    num_output = sum(one.num_tokens for one in times)
    steady = [(one.last_token - one.first_token) / (one.num_tokens - 1) for one in times if one.num_tokens > 1]
    return {
        "engine": NAME,
        "version": VERSION,
        "dtype": bench.dtype,
        "workload": run.workload.name,
        "requests": len(times),
        "in_tok": num_input,
        "out_tok": num_output,
        "ok": num_output == run.workload.num_output_tokens,
        "wall_s": round(run.wall_s, 4),
        "out_tok_s": round(num_output / run.wall_s, 2),
        "total_tok_s": round((num_input + num_output) / run.wall_s, 2),
        "ttft_ms": summary_ms([one.first_token - run.begin for one in times]),
        "tpot_ms": summary_ms(steady),
        "threads": bench.threads,
        "round": round_,
        "rep": rep,
        "peak_rss_mb": run.peak_rss_mb,
        "pss_mb": run.pss_mb,
        "cpu_s": run.cpu_s,
        "foreign_cpu_s": round(run.foreign_cpu_s, 2),
        "steal_s": round(run.steal_s, 2),
        "noisy": run.foreign_cpu_s > _NOISY_SHARE * run.wall_s,
        "ready_s": bench.ready_s,
        "start_to_first_token_s": bench.start_to_first_token_s,
    }


def startup_record(
    config: EngineConfig, threads: int, measured: MeasuredStartup, parts: Parts, *, kernel_cache: str, rep: int
) -> dict[str, Any]:
    """Return the record of one start. threads: of the engine. parts: from measure_parts()."""
    startup = measured.startup
    return {
        "engine": NAME,
        "version": VERSION,
        "dtype": config.dtype,
        "workload": "startup",
        "threads": threads,
        "rep": rep,
        "import_s": startup.import_s,
        "ready_s": startup.ready_s,
        "start_to_first_token_s": startup.start_to_first_token_s,
        "kernel_cache": kernel_cache,
        "phases": startup.phases,
        "parts": {name: {"wall_s": part.wall_s, "cpu_s": part.cpu_s} for name, part in parts.items()},
        "wall_s": round(measured.wall_s, 4),
        "peak_rss_mb": startup.peak_rss_mb,
        "pss_mb": startup.pss_mb,
        "foreign_cpu_s": round(measured.foreign_cpu_s, 2),
        "steal_s": round(measured.steal_s, 2),
        "noisy": measured.foreign_cpu_s > _NOISY_SHARE * measured.wall_s,
    }


def summary_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return mean, median and 99th percentile in milliseconds; None for no values."""
    if not seconds:
        return None
    values = {"mean": sum(seconds) / len(seconds), "p50": percentile(seconds, 0.5), "p99": percentile(seconds, 0.99)}
    return {name: round(value * 1000, 2) for name, value in values.items()}


# cpu_name(): the CPU of this machine. On virtual machines, names alone do not distinguish generations.


_CPU_INFO = Path("/proc/cpuinfo")


def cpu_name() -> str:
    """Return the CPU's name, family and model number; "unknown" if the system does not say."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return "unknown"
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    if "model name" not in fields:
        return "unknown"
    return f"{fields['model name']}, family {fields.get('cpu family', '?')}, model {fields.get('model', '?')}"
