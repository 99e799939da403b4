"""The cost of measuring requests: the meter alone, and the same load with and without it on the fake executor."""

import statistics
import time
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np

from core.border.meter import RequestMeter
from frontend.engine.process import EngineProcess
from ipc.options.config import EngineConfig
from ipc.version import NAME, VERSION
from ipc.wire.messages import AddRequest, Outputs
from tools.lab.bench.ipc import NUM_STREAMS, Connections, streaming_seconds
from tools.lab.bench.runs import request_params

BATCHES = (64, 1024)
_NUM_PAIRS = 20
_TOKENS_PER_ROUND = 200  # of each stream
_STEPS = 2000


def measure_metrics(config: EngineConfig, *, rep: int) -> list[dict[str, Any]]:
    """Return a record for each batch size (the meter's time for a step), and one for an engine process (tokens/s)."""
    records = [_measure_meter(batch) for batch in BATCHES]
    records.append(_measure_process(config))
    names = {"engine": NAME, "version": VERSION, "rep": rep, "pairs": _NUM_PAIRS}
    return [{**names, **record} for record in records]


def _measure_meter(batch: int) -> dict[str, Any]:
    """Measure steps with the same requests as the step before, and steps in which one ends and another begins."""
    steady, changing = [], []
    meter, numbers = RequestMeter(4096), np.arange(batch)
    for number in numbers.tolist():
        meter.note_request(1, _request(number), None, 0.0)
    for step in range(_STEPS):
        positions = np.full(batch, step)
        steady.append(_seconds(meter, numbers, positions, np.zeros(batch, np.uint8), step))
    started = np.full(batch, _STEPS)
    for step in range(_STEPS, 2 * _STEPS):
        finish = np.zeros(batch, np.uint8)
        finish[step % batch] = 2
        request = _request(batch + step)
        begin = time.perf_counter()
        meter.note_request(1, request, None, float(step))
        arrived_s = time.perf_counter() - begin
        changing.append(_seconds(meter, numbers, np.maximum(0, step - started), finish, step) + arrived_s)
        numbers = numbers.copy()
        numbers[step % batch], started[step % batch] = batch + step, step + 1
    return {
        "workload": "metrics steps",
        "batch": batch,
        "steady_step_us": round(statistics.median(steady) * 1e6, 2),
        "changing_step_us": round(statistics.median(changing) * 1e6, 2),
    }


def _seconds(meter: RequestMeter, numbers: Any, positions: Any, finish: Any, step: int) -> float:
    size = len(numbers)
    message = Outputs(
        epoch=0,
        step=step,
        numbers=numbers.astype("<u4").tobytes(),
        positions=positions.astype("<u4").tobytes(),
        counts=np.ones(size, "<u2").tobytes(),
        tokens=bytes(4 * size),
        finish=finish.tobytes() if finish.any() else b"",
    )
    begin = time.perf_counter()
    meter.note_messages([(1, message)], float(step))
    return time.perf_counter() - begin


def _request(number: int) -> AddRequest:
    return AddRequest(number, bytes(4 * 32), request_params(100_000), seed=0)


def _measure_process(config: EngineConfig) -> dict[str, Any]:
    rates: list[list[float]] = [[], []]
    with ExitStack() as stack:
        configs = (config, msgspec.structs.replace(config, request_metrics=True))
        processes = [stack.enter_context(EngineProcess(one)) for one in configs]
        connections = [stack.enter_context(Connections(process.address, 1)) for process in processes]
        for number in range(_NUM_PAIRS + 1):  # the first is a warm-up
            for which, one in enumerate(connections):
                rate = NUM_STREAMS * _TOKENS_PER_ROUND / streaming_seconds(one, _TOKENS_PER_ROUND)
                if number:
                    rates[which].append(rate)
    plain, measured = map(statistics.median, rates)
    return {
        "workload": "metrics tokens",
        "streams": NUM_STREAMS,
        "out_tok_s": round(plain),
        "measured_out_tok_s": round(measured),
        "ratio": round(measured / plain, 3),
        "quartiles": [[round(value) for value in statistics.quantiles(one, n=4)] for one in rates],
    }
