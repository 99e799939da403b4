"""The cost of the scheduler: schedule + update_from_output per step, without a model and without a process border.

The load is that of other engines' published figures: block size 16, prefix caching and statistics on, prompts of 64 to
79 tokens, one token for each request and step. With churn, this share of the requests finishes in every step and is
replaced before the next.
"""

import gc
import statistics
import time
from typing import Any, NamedTuple

import msgspec
import numpy as np

from core.batch.request import Request, request_from_message
from core.execution.plan import NO_TOKEN, ModelRunnerOutput
from core.executors.fake import FakeExecutor
from core.process.resolve import resolve
from core.scheduling.scheduler import Scheduler
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from ipc.version import NAME, VERSION
from ipc.wire.messages import AddRequest
from tools.commands.replay.latency import percentile


class Load(NamedTuple):
    """Requests that run and wait. churn: share of the running ones that is replaced in each step."""

    running: int
    waiting: int = 0
    churn: float = 0.0


LOADS = (
    Load(256),
    Load(1024),
    Load(4096),
    Load(256, churn=0.1),
    Load(1024, churn=0.1),
    Load(4096, churn=0.1),
    Load(256, waiting=20_000),
    Load(256, waiting=100_000),
    Load(256, waiting=100_000, churn=0.1),
)
_BLOCK_SIZE = 16
_BLOCKS_PER_REQUEST = 40
_WARM_UP = 40
_STEPS = 160
_NUM_CALLS = 1000  # of add_request and of finish_requests


def measure_scheduler(config: EngineConfig, *, rep: int) -> list[dict[str, Any]]:
    """Return a record for each load, in microseconds.

    config: its policy and its admission options apply; its sizes are replaced by those of the load.
    """
    names = {"engine": NAME, "version": VERSION, "workload": "scheduler", "rep": rep}
    return [{**names, "policy": config.scheduling_policy, **load._asdict(), **_measure(config, load)} for load in LOADS]


def _measure(config: EngineConfig, load: Load) -> dict[str, Any]:
    driver = _Driver(config, load)
    schedule: list[float] = []
    update: list[float] = []
    for step in range(_WARM_UP + _STEPS):
        driver.replace_finished()
        begin = time.perf_counter()
        plan = driver.scheduler.schedule(step * 1_000_000)
        middle = time.perf_counter()
        output = driver.output(plan.step, plan.rows)
        resumed = time.perf_counter()
        driver.scheduler.update_from_output(plan, output)
        end = time.perf_counter()
        if step >= _WARM_UP:
            schedule.append((middle - begin) * 1e6)
            update.append((end - resumed) * 1e6)
    both = [one + other for one, other in zip(schedule, update, strict=True)]
    return {
        "steps": len(both),
        "schedule_us": _summary(schedule),
        "update_us": _summary(update),
        "step_us": _summary(both),
        "add_us": _summary(driver.time_adding()),
        "abort_us": _summary(driver.time_aborting()),
    }


def _summary(values: list[float]) -> dict[str, float]:
    numbers = (statistics.fmean(values), percentile(values, 0.5), percentile(values, 0.99))
    return {name: round(number, 1) for name, number in zip(("mean", "p50", "p99"), numbers, strict=True)}


class _Driver:
    """A scheduler under load. The sampled tokens are made up."""

    def __init__(self, config: EngineConfig, load: Load) -> None:
        self._load = load
        self._serial = 0
        sized = msgspec.structs.replace(
            config,
            max_num_seqs=load.running,
            max_num_batched_tokens=max(8192, load.running),
            block_size=_BLOCK_SIZE,
            num_blocks_override=load.running * _BLOCKS_PER_REQUEST + 64,
            max_model_len=4096,
            enable_prefix_caching=True,
        )
        executor = FakeExecutor(sized)
        blocks_in = executor.determine_num_available_blocks
        resolved = resolve(sized, executor.info, blocks_in, total_memory_bytes=1 << 36, num_cpus=1)
        self.scheduler = Scheduler(resolved, (2,))
        gc.collect()
        gc.freeze()  # as the engine process does
        self.replace_finished()

    def replace_finished(self) -> None:
        missing = self._load.running + self._load.waiting - sum(self.scheduler.get_request_counts())
        for _ in range(missing):
            self.scheduler.add_request([self._request()], 0)

    def output(self, step: int, rows: np.ndarray[Any, np.dtype[np.int32]]) -> ModelRunnerOutput:
        table = self.scheduler.table
        done = table.num_computed_tokens[rows] >= table.num_tokens[rows]
        return ModelRunnerOutput(step, np.where(done, 7 + step, NO_TOKEN).astype(np.int32))

    def time_adding(self) -> list[float]:
        requests = [self._request() for _ in range(_NUM_CALLS)]
        self._added = [request.number for request in requests]
        return [_time(lambda request=request: self.scheduler.add_request([request], 0)) for request in requests]

    def time_aborting(self) -> list[float]:
        return [_time(lambda number=number: self.scheduler.finish_requests(0, [number])) for number in self._added]

    def _request(self) -> Request:
        number, churn = self._serial, self._load.churn
        self._serial += 1
        life = round(1 / churn) if churn else 500
        if churn and number < self._load.running:  # the first requests end at different steps
            life = 40 + number * 7919 % life
        prompt = (number * 31 + np.arange(64 + number % 16)) % 30_000 + 5
        params = SamplingParams(max_tokens=life, ignore_eos=True, temperature=0)
        message = AddRequest(number, prompt.astype("<i4").tobytes(), params, seed=0)
        return request_from_message(message, 0, number, 4096)


def _time(call: Any) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6
