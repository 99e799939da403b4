"""`engine-core traces FILE ...`: public request traces through the scheduler, under each policy, in virtual time."""

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from core.executors.fake import create
from core.executors.fake_options import read_fake_options, with_fake_options
from core.process.resolve import resolve, resolve_costs
from frontend.fleet.placement import POLICIES
from ipc.errors import ConfigError
from ipc.options.config import SchedulingPolicy
from ipc.options.given_options import config_from_options
from ipc.options.resolved import ResolvedConfig
from tools.flags.options import ArgumentParser, add_engine_options, engine_options
from tools.lab.traces.fleet import busiest_share, simulate_fleet
from tools.lab.traces.formats import read_trace
from tools.lab.traces.report import read_report, write_report
from tools.lab.traces.row import Making
from tools.lab.traces.simulation import StepTime, simulate
from tools.lab.traces.summary import Seconds, run_record, ttft_seconds
from tools.lab.traces.workload import Workload, make_workload

EXIT_UNFINISHED = 1
#: Engine options whose defaults differ from the engine's own. The blocks hold 65,520 tokens.
_OPTIONS = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "num_blocks_override": 4096}
_EPILOG = """\
Lengths: if a trace's longest request has more than --max-tokens tokens, all lengths are multiplied by k/512, with
the largest whole k for which it fits. Prompt blocks that are equal in a trace (hash_ids) get equal tokens.

Every fifth request is urgent (priority 0, the others 1). Client 0 sends every other request; the rest take turns.

A step takes step-ms + token-us * tokens computed + context-ns * tokens of KV cache read. The defaults are round numbers
near those of an 8B model on a large GPU.

exit status: 0 all finished, 1 not all, 2 usage"""


def main(arguments: Sequence[str]) -> int:
    """Run each trace under each policy, print a JSON line for each run; return the exit status. Errors: ConfigError."""
    parsed = _parser().parse_args(arguments)
    options = engine_options(parsed)
    _check(parsed, options)
    if parsed.replicas is not None:
        return _run_fleets(parsed, options)
    policies = [options["scheduling_policy"]] if "scheduling_policy" in options else get_args(SchedulingPolicy)
    making = Making(parsed.rate, parsed.burstiness, parsed.seed, parsed.tokenizer)
    if parsed.report is not None:
        read_report(parsed.report)  # what is wrong with it is said before the work is done
    records: list[dict[str, Any]] = []
    ttfts: dict[str, dict[str, Seconds]] = {}
    for path, time_scale in zip(parsed.files, _time_scales(parsed), strict=True):
        trace = read_trace(path, parsed.rows, making)
        for policy in policies:
            config = _config({**options, "scheduling_policy": policy}, parsed)
            workload = make_workload(
                trace,
                max_tokens=parsed.max_tokens,
                time_scale=time_scale,
                num_clients=parsed.clients,
                vocab_size=read_fake_options(config).vocab_size,
            )
            record, ttft = _run(workload, config, parsed)
            records.append(record)
            if len(ttft):
                ttfts.setdefault(trace.name, {})[policy] = ttft
    if parsed.report is not None:
        write_report(parsed.report, _command(arguments), records, ttfts)
    return 0 if all(record["finished"] == record["requests"] for record in records) else EXIT_UNFINISHED


def _run_fleets(parsed: argparse.Namespace, options: dict[str, Any]) -> int:
    """Run each trace through a fleet under each routing policy, and through one engine as large as all replicas
    together; print a line for each, and return the exit status.
    """
    is_whole = True
    for path, time_scale in zip(parsed.files, _time_scales(parsed), strict=True):
        config = _config(options, parsed)
        workload = make_workload(
            read_trace(path, parsed.rows),
            max_tokens=parsed.max_tokens,
            time_scale=time_scale,
            num_clients=parsed.clients,
            vocab_size=read_fake_options(config).vocab_size,
        )
        for route in parsed.route or (*POLICIES, ONE_CACHE):
            record = run_fleet(workload, config, _step_time(config, parsed), parsed.replicas, route)
            sys.stdout.write(json.dumps(record) + "\n")
            sys.stdout.flush()
            is_whole &= record["finished"] == record["requests"]
    return 0 if is_whole else EXIT_UNFINISHED


def _step_time(config: ResolvedConfig, parsed: argparse.Namespace) -> StepTime:
    return StepTime(
        fixed_ns=round(parsed.step_ms * 1e6),
        token_ns=round(parsed.token_us * 1e3),
        context_ns=parsed.context_ns,
        copy_ns=config.swap_ns_per_block,
    )


def _run(workload: Workload, config: ResolvedConfig, parsed: argparse.Namespace) -> tuple[dict[str, Any], Seconds]:
    """Run one workload, print its record as one line, and return (record, TTFT of each request in seconds)."""
    step_time = _step_time(config, parsed)
    begin = time.perf_counter()
    observed = simulate(config, workload.requests, step_time)
    record = run_record(workload, config, observed, time.perf_counter() - begin)
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()
    return record, ttft_seconds(observed)


def _config(options: dict[str, Any], parsed: argparse.Namespace) -> ResolvedConfig:
    """Default costs of preemption: the step time of a token, and 80 us for a block."""
    costs = {"recompute_ns_per_token": max(1, round(parsed.token_us * 1e3)), "swap_ns_per_block": 80_000}
    fixed = {"executor": "fake", "max_model_len": parsed.max_tokens}
    defaults = dict(_OPTIONS)
    if options.get("enable_chunked_prefill") is False:
        del defaults["max_num_batched_tokens"]  # the engine's own default has room for every whole prompt
    config = config_from_options(**{**defaults, **costs, **options, **fixed})
    config = with_fake_options(config, max_model_len=parsed.max_tokens)
    executor = create(config)
    resolved = resolve(
        config,
        executor.info,
        executor.determine_num_available_blocks,
        total_memory_bytes=2**36,  # on a virtual machine
        num_cpus=1,
    )
    return resolve_costs(resolved, config, executor.measure_costs, executor.measure_steps)


def _check(parsed: argparse.Namespace, options: dict[str, Any]) -> None:
    if options.get("executor", "fake") != "fake" or "model" in options or "max_model_len" in options:
        raise ConfigError(
            "traces run on the fake executor, and --max-tokens sets max_model_len: leave out --executor, --model and "
            "--max-model-len"
        )
    if parsed.route is not None and parsed.replicas is None:
        raise ConfigError("--route is for a fleet: also give --replicas N")
    for name in ("rows", "max_tokens", "clients", "replicas"):
        value = getattr(parsed, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1; got {value}")
    for name in ("rate", "burstiness"):
        if (value := getattr(parsed, name)) is not None and not 0 < value < 1e9:
            raise ConfigError(f"--{name} must be a number above 0; got {value}")
    for name in ("step_ms", "token_us", "context_ns"):
        _check_number(name, getattr(parsed, name))
    if parsed.step_ms < 0.001:
        raise ConfigError(f"--step-ms must be at least 0.001, so that time passes; got {parsed.step_ms}")


def _time_scales(parsed: argparse.Namespace) -> list[float]:
    """Return one factor on arrival times for each file. Errors: ConfigError."""
    scales: list[float] = parsed.time_scale
    if len(scales) not in (1, len(parsed.files)):
        raise ConfigError(f"--time-scale takes one number, or one for each of {len(parsed.files)} files; got {scales}")
    for scale in scales:
        _check_number("time_scale", scale)
    return scales if len(scales) > 1 else scales * len(parsed.files)


def _check_number(name: str, value: float) -> None:
    if not math.isfinite(value) or not 0 <= value <= 1e6:
        raise ConfigError(f"--{name.replace('_', '-')} must be a number from 0 to 1e6; got {value}")


def _numbers(text: str) -> list[float]:
    """Parse "0.2" or "0.2,0.4". Errors: those of argparse."""
    return [float(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="engine-core traces",
        usage="engine-core traces FILE ... [--report FILE.md] [OPTION ...]",
        description="Run request traces (Mooncake, Qwen-Bailian, Azure 2023 and 2024, BurstGPT,\nShareGPT, ServeGen, "
        "LLMServingSim's from vLLM, captures) through the scheduler\nunder each policy, or under "
        "--scheduling-policy, in virtual time; prints one\nJSON line for each.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="a trace; its format is detected from its content"
    )
    parser.add_argument("--rows", type=int, metavar="N", help="read the first N rows of each; default: all")
    parser.add_argument("--max-tokens", type=int, default=8192, metavar="N", help="longest request; default: 8192")
    parser.add_argument(
        "--time-scale",
        type=_numbers,
        default=[1.0],
        metavar="X[,X...]",
        help="factor on arrival times, one for all files or one for each; 0.5: twice as fast; default: 1",
    )
    parser.add_argument("--clients", type=int, default=5, metavar="N", help="number of clients; default: 5")
    parser.add_argument("--rate", type=float, metavar="X", help="requests a second for ShareGPT, which has no times")
    parser.add_argument("--burstiness", type=float, default=1.0, metavar="X", help="of them: 1 = Poisson; default: 1")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="of ShareGPT: what measures its texts")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of generated requests; default: 0")
    parser.add_argument("--step-ms", type=float, default=10.0, metavar="X", help="of every step; default: 10")
    parser.add_argument("--token-us", type=float, default=50.0, metavar="X", help="of a token computed; default: 50")
    parser.add_argument("--context-ns", type=float, default=70.0, metavar="X", help="time of a token read; default: 70")
    parser.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="run a fleet of this many engines, under each --route (docs/scale_out.md)",
    )
    parser.add_argument(
        "--route",
        choices=(*POLICIES, ONE_CACHE),
        action="append",
        help=f"with --replicas; {ONE_CACHE} = one engine as large as all of them; may be repeated; default: each",
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE.md",
        help="write the table and the plot (FILE.svg) between this file's marks",
    )
    add_engine_options(parser)
    return parser


def _command(arguments: Sequence[str]) -> str:
    """Return the command as typed in the folder of the traces, without this machine's folders."""
    words = [Path(word).name if word.endswith((".jsonl", ".csv", ".md")) else word for word in arguments]
    return "engine-core traces " + shlex.join(words)


# One simulated run of a fleet as a record: the line that is printed.


#: Instead of a routing policy: one engine with the cache, the rows and the speed of all replicas together.
ONE_CACHE = "one_cache"


def run_fleet(
    workload: Workload, config: ResolvedConfig, step_time: StepTime, count: int, route: str, seed: int = 0
) -> dict[str, Any]:
    """Return the record of a workload under a routing policy, or ONE_CACHE."""
    begin = time.perf_counter()
    if route == ONE_CACHE:
        config, step_time = _together(config, step_time, count)
        observed, own = simulate(config, workload.requests, step_time), {}
    else:
        run = simulate_fleet(config, workload.requests, step_time, count=count, policy=route, seed=seed)
        observed, own = run.observed, {"busiest": round(busiest_share(run.computed_tokens), 3)}
    record = run_record(workload, config, observed, time.perf_counter() - begin)
    return {"route": route, "replicas": count, **own, **record}


def _together(config: ResolvedConfig, step_time: StepTime, count: int) -> tuple[ResolvedConfig, StepTime]:
    """Return the config and the step time of one engine as large as `count` of them."""
    larger = msgspec.structs.replace(
        config,
        num_blocks_override=count * config.num_blocks_override,
        max_num_seqs=count * config.max_num_seqs,
        max_num_batched_tokens=count * config.max_num_batched_tokens,
    )
    faster = step_time._replace(token_ns=step_time.token_ns // count, context_ns=step_time.context_ns / count)
    return larger, faster
