"""The cost of the black box: the time in its calls, in steps of the fake executor.

The calls are timed, not the steps with and without them: two equal engines differ by more than the box costs.
"""

import statistics
import time
from typing import Any

import msgspec
import numpy as np

from core.engine import EngineCore
from core.execution.plan import ModelRunnerOutput, SchedulerOutput
from core.executors.by_name import load_executor
from core.process.black_box import BlackBox
from core.process.resolve import resolve
from ipc.options.config import EngineConfig
from ipc.records.black_box import BlackBoxFile
from ipc.version import NAME, VERSION
from ipc.wire.messages import AddRequest
from tools.lab.bench.runs import request_params

BATCHES = (64, 1024)
_NUM_STEPS = 5000
_NUM_CALLS = 3  # of each step, including one clock reading each


class _Timed:
    """A black box whose calls are timed."""

    def __init__(self, box: BlackBox) -> None:
        self.box = box
        self.taken_ns = 0

    def begin(self, plan: SchedulerOutput) -> None:
        """Note a step that begins."""
        began = time.perf_counter_ns()
        self.box.begin(plan)
        self.taken_ns += time.perf_counter_ns() - began

    def end(self, output: ModelRunnerOutput) -> None:
        """Note the end of the oldest step."""
        began = time.perf_counter_ns()
        self.box.end(output)
        self.taken_ns += time.perf_counter_ns() - began

    def turn(self) -> None:
        """Note the end of a turn of the loop."""
        began = time.perf_counter_ns()
        self.box.turn(0)
        self.taken_ns += time.perf_counter_ns() - began


def measure_black_box(config: EngineConfig, *, rep: int) -> list[dict[str, Any]]:
    """Return a record for each batch size: the median step, and the box's part of each."""
    names = {"engine": NAME, "version": VERSION, "workload": "black box", "rep": rep, "steps": _NUM_STEPS}
    return [{**names, **_measure(config, batch)} for batch in BATCHES]


def _measure(config: EngineConfig, batch: int) -> dict[str, Any]:
    file = BlackBoxFile(batch)
    timed = _Timed(BlackBox(file.fd, batch, 0))
    engine = _engine(config, batch, timed)
    timed.box.watch(engine.scheduler)
    engine.step([(1, _request(number)) for number in range(batch)], 0)
    clock_ns = _clock_ns()
    steps_us, boxes_us = list[float](), list[float]()
    for _ in range(_NUM_STEPS):
        begin, timed.taken_ns = time.perf_counter_ns(), 0
        engine.step([], time.monotonic_ns())
        timed.turn()
        steps_us.append((time.perf_counter_ns() - begin) / 1000)
        boxes_us.append((timed.taken_ns - _NUM_CALLS * clock_ns) / 1000)
    box_us, step_us = statistics.median(boxes_us), statistics.median(steps_us)
    return {
        "batch": batch,
        "box_us": round(box_us, 2),
        "box_us_p10": round(statistics.quantiles(boxes_us, n=10)[0], 2),  # of undisturbed steps
        "step_us": round(step_us, 1),
        "share": round(box_us / step_us, 4),
    }


def _clock_ns() -> float:
    """Return how long two consecutive clock readings take, ns."""
    return statistics.median(-(time.perf_counter_ns() - time.perf_counter_ns()) for _ in range(1000))


def _engine(config: EngineConfig, batch: int, *watchers: Any) -> EngineCore:
    """Return an engine with this many rows."""
    sizes = {"max_num_seqs": batch, "max_num_batched_tokens": 32_768, "num_blocks_override": batch * 128}
    config = msgspec.structs.replace(config, **sizes)
    executor = load_executor(config)
    blocks_in = executor.determine_num_available_blocks
    config = resolve(config, executor.info, blocks_in, total_memory_bytes=1 << 36, num_cpus=1)
    executor.initialize_cache(config)
    return EngineCore(config, executor, 0, watchers)


def _request(number: int) -> AddRequest:
    prompt = np.arange(20 + number, 36 + number, dtype="<i4") % 1000
    return AddRequest(number, prompt.tobytes(), request_params(100_000), seed=0)
