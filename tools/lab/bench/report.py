"""One JSON object a line for each result.

Its fields are those of the other engines' runners, so that lines can be compared.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ipc.options.config import EngineConfig
from ipc.version import NAME, VERSION
from tools.commands.replay.latency import percentile
from tools.lab.bench.runs import Bench, Run
from tools.lab.bench.startup import MeasuredStartup
from tools.lab.bench.startup_parts import Parts

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
