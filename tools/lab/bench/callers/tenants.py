"""What a greedy tenant costs a polite one: the polite one's time to first token, alone and next to 1,000 other
requests.

Each sends through one session to an engine with policy fair and steps of step_us. The polite one sends one
request after another, with no other work of its own or with some streams of its own. A request that arrives during a
step waits for its end. Alone and without other work there is none, so company costs at least one more step. Both rounds
run on one engine, first alone.
"""

import statistics
import time
from typing import Any

import msgspec
import numpy as np

from core.executors.fake_options import with_fake_options
from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from frontend.engine.process import EngineProcess
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from ipc.version import NAME, VERSION
from tools.commands.replay.latency import percentile

_STEP_US = 5000
_GREEDY = 1000  # requests
_ASKED = 100  # requests of the polite one in a round
_OWN = 8  # streams of the polite one in addition to its requests
_ROWS = 64


def measure_tenants(config: EngineConfig, *, rep: int) -> list[dict[str, Any]]:
    """Return a record for each number of own streams: times to first token in ms, and the ratio of the p99s."""
    return [_measure(config, own, rep) for own in (0, _OWN)]


def _measure(config: EngineConfig, num_own: int, rep: int) -> dict[str, Any]:
    config = msgspec.structs.replace(
        with_fake_options(config, step_us=_STEP_US, max_model_len=100_000),
        scheduling_policy="fair",
        max_num_seqs=_ROWS,
        max_num_queued_requests=2 * _GREEDY,
    )
    with EngineProcess(config) as engine:
        polite, greedy = (EngineClient(ZmqTransport(engine.address)) for _ in range(2))
        try:
            _ask(polite, 0)  # the first steps of all
            long = SamplingParams(max_tokens=50_000, ignore_eos=True, temperature=0.0)
            for number in range(num_own):
                polite.submit([900 + number] * 64, long, seed=0, tenant="polite")
            alone = _ask(polite, 1)
            for number in range(_GREEDY):
                greedy.submit([number % 900 + 1] * 64, long, seed=0, tenant="greedy")
            while greedy.statistics().num_running < _ROWS // 2:
                time.sleep(0.01)
            before = greedy.statistics()
            beside = _ask(polite, 2)
            after = greedy.statistics()
        finally:
            polite.close()
            greedy.close()
    p99 = [percentile(times, 0.99) for times in (alone, beside)]
    return {
        "engine": NAME,
        "version": VERSION,
        "workload": "tenants",
        "rep": rep,
        "step_ms": _STEP_US / 1000,
        "greedy_requests": _GREEDY,
        "own_streams": num_own,
        "alone_ms": {"p50": round(statistics.median(alone), 2), "p99": round(p99[0], 2)},
        "beside_ms": {"p50": round(statistics.median(beside), 2), "p99": round(p99[1], 2)},
        "p99_ratio": round(p99[1] / p99[0], 2),
        "preemptions": after.num_preemptions - before.num_preemptions,
        "recomputed_tokens": after.num_recomputed_tokens - before.num_recomputed_tokens,
        "tokens": after.num_scheduled_tokens - before.num_scheduled_tokens,
    }


def _ask(client: EngineClient, round_: int) -> list[float]:
    """Return the ms from submit to the first token of requests, one after another; no two share a prompt."""
    times = []
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
    for number in range(_ASKED):
        begin = time.perf_counter()
        prompt = [round_ + 1, number + 1] * 32
        request = client.submit(prompt, params, seed=0, tenant="polite", streaming=True)
        while not len(client.read(request).token_ids):
            client.wait(np.array([request]), 0.05)
        times.append((time.perf_counter() - begin) * 1000)
        while not client.read(request).finish:
            client.wait(np.array([request]), 0.05)
        client.discard([request])
    return times
