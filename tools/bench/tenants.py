"""What a greedy tenant costs a polite one: the polite one's time to first token, alone and beside 1,000 other requests.

Both send through one session each to an engine of policy fair with steps of fake_step_us; the polite one has one
request at a time. Both rounds are on one engine, alone first.
"""

import statistics
import time
from typing import Any

import msgspec
import numpy as np

from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from frontend.engine.process import EngineProcess
from ipc.config import EngineConfig
from ipc.sampling_params import SamplingParams
from ipc.version import NAME, VERSION
from tools.bench.report import percentile

_STEP_US = 5000
_GREEDY = 1000  # requests
_ASKED = 100  # requests of the polite one in a round
_ROWS = 64


def measure_tenants(config: EngineConfig, *, rep: int) -> list[dict[str, Any]]:
    """Return one record: times to first token in ms, and the ratio of their 99th percentiles."""
    config = msgspec.structs.replace(
        config,
        scheduling_policy="fair",
        fake_step_us=_STEP_US,
        fake_max_model_len=100_000,
        max_num_seqs=_ROWS,
        max_num_queued_requests=2 * _GREEDY,
    )
    with EngineProcess(config) as engine:
        polite, greedy = (EngineClient(ZmqTransport(engine.address)) for _ in range(2))
        try:
            _ask(polite, 0)  # the first steps of all
            alone = _ask(polite, 1)
            long = SamplingParams(max_tokens=50_000, ignore_eos=True, temperature=0.0)
            for number in range(_GREEDY):
                greedy.submit([number % 900 + 1] * 64, long, seed=0, tenant="greedy")
            while greedy.statistics().num_running < _ROWS // 2:
                time.sleep(0.01)
            beside = _ask(polite, 2)
        finally:
            polite.close()
            greedy.close()
    names = {"engine": NAME, "version": VERSION, "workload": "tenants", "rep": rep, "step_ms": _STEP_US / 1000}
    p99 = [percentile(times, 0.99) for times in (alone, beside)]
    return [
        {
            **names,
            "greedy_requests": _GREEDY,
            "alone_ms": {"p50": round(statistics.median(alone), 2), "p99": round(p99[0], 2)},
            "beside_ms": {"p50": round(statistics.median(beside), 2), "p99": round(p99[1], 2)},
            "p99_ratio": round(p99[1] / p99[0], 2),
        }
    ]


def _ask(client: EngineClient, round_: int) -> list[float]:
    """Return the ms from submit to the first token of requests, one after another; no two have a prompt in common."""
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
