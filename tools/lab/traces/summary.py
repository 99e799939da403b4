"""One simulated run as a record: the line that is printed, and the row of the report's table."""

from typing import Any

import numpy as np

from ipc.options.resolved import ResolvedConfig
from ipc.tables.arrays import Doubles, Ints
from tools.lab.traces.simulation import Observed
from tools.lab.traces.workload import Workload

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
Seconds = Doubles


def ttft_seconds(observed: Observed) -> Seconds:
    """Return the time to first token of the requests that have one, in seconds.

    It is the time from arrival to the end of the step that gave the first token.
    """
    has_token = observed.num_tokens > 0
    seconds: Seconds = (observed.first_tokens - observed.arrivals)[has_token] / 1e9
    return seconds


def run_record(workload: Workload, config: ResolvedConfig, observed: Observed, wall_s: float) -> dict[str, Any]:
    """Return the record of a run. Times are in virtual seconds; wall_s is the duration of the simulation itself."""
    stats, started = observed.stats, observed.scheduled >= 0
    steady = observed.num_tokens > 1
    tpot = (observed.last_tokens - observed.first_tokens)[steady] / (observed.num_tokens[steady] - 1)
    record = {
        "trace": workload.trace.name,
        "policy": config.scheduling_policy,
        "preemption_mode": config.preemption_mode,
        "requests": len(workload.requests),
        "finished": int(observed.finished.sum()),
        "length_scale": round(workload.length_scale, 6),
        "ttft_s": _quantiles(ttft_seconds(observed)),
        "queueing_s": _quantiles((observed.scheduled - observed.arrivals)[started] / 1e9),
        "tpot_ms": _quantiles(tpot / 1e6),
        "ttft_s_of": _groups(workload, observed),
        "preemptions": stats.num_preemptions,
        "swapped_in_blocks": stats.num_swapped_in_blocks,
        "recomputed_tokens": stats.num_recomputed_tokens,
        "thrash": _share(stats.num_recomputed_tokens, stats.num_scheduled_tokens),
        "prefix_hit_rate": _share(stats.prefix_cache_hits, stats.prefix_cache_queries),
        "steps": stats.num_steps,
        "makespan_s": round(observed.end_ns / 1e9, 3),
        "wall_s": round(wall_s, 3),
    }
    measured = [row.ttft_s for row in workload.trace.rows if row.ttft_s is not None]
    if measured:  # on the machine and with the engine that recorded the trace
        record["recorded_ttft_s"] = _quantiles(np.array(measured))
    return record


def _groups(workload: Workload, observed: Observed) -> dict[str, dict[str, float] | None]:
    """Return the TTFT quantiles of the groups that the policies treat differently."""
    urgent = np.array([request.message.priority == 0 for request in workload.requests])
    first = np.array([request.client == 0 for request in workload.requests])
    has_token = observed.num_tokens > 0
    ttft: Ints = observed.first_tokens - observed.arrivals
    masks = {"urgent": urgent, "others": ~urgent, "client_0": first, "other_clients": ~first}
    return {name: _quantiles(ttft[mask & has_token] / 1e9) for name, mask in masks.items()}


def _quantiles(values: Seconds) -> dict[str, float] | None:
    if not len(values):
        return None
    return {name: round(float(np.quantile(values, share)), 4) for name, share in _QUANTILES.items()}


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0
