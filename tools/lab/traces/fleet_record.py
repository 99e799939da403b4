"""One simulated run of a fleet as a record: the line that is printed."""

import time
from typing import Any

import msgspec

from ipc.options.config import EngineConfig
from tools.lab.traces.fleet import busiest_share, simulate_fleet
from tools.lab.traces.simulation import StepTime, simulate
from tools.lab.traces.summary import run_record
from tools.lab.traces.workload import Workload

#: In the place of a routing policy: one engine with the cache, the rows and the speed of all replicas together.
ONE_CACHE = "one_cache"


def run_fleet(
    workload: Workload, config: EngineConfig, step_time: StepTime, count: int, route: str, seed: int = 0
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


def _together(config: EngineConfig, step_time: StepTime, count: int) -> tuple[EngineConfig, StepTime]:
    """Return the config and the step time of one engine that is `count` of them."""
    assert config.num_blocks_override is not None, "the config is not resolved"
    assert config.max_num_batched_tokens is not None, "the config is not resolved"
    larger = msgspec.structs.replace(
        config,
        num_blocks_override=count * config.num_blocks_override,
        max_num_seqs=count * config.max_num_seqs,
        max_num_batched_tokens=count * config.max_num_batched_tokens,
    )
    faster = step_time._replace(token_ns=step_time.token_ns // count, context_ns=step_time.context_ns / count)
    return larger, faster
