"""The cost of the black box: steps of the fake executor with and without it, turn about."""

import statistics
import time
from typing import Any

import msgspec
import numpy as np

from core.engine import EngineCore
from core.executors.by_name import load_executor
from core.process.black_box import BlackBox
from core.process.resolve import resolve
from ipc.black_box import BlackBoxFile
from ipc.config import EngineConfig
from ipc.messages import AddRequest
from ipc.version import NAME, VERSION
from tools.bench.runs import request_params

BATCHES = (64, 1024)
_NUM_PAIRS = 5000  # of steps, one after the other on two equal engines


def measure_black_box(config: EngineConfig, *, rep: int) -> list[dict[str, Any]]:
    """Return a record for each batch size: medians of steps with and without a box, and their difference."""
    names = {"engine": NAME, "version": VERSION, "workload": "black box", "rep": rep, "pairs": _NUM_PAIRS}
    return [{**names, **_measure(config, batch)} for batch in BATCHES]


def _measure(config: EngineConfig, batch: int) -> dict[str, Any]:
    file = BlackBoxFile(batch)
    box = BlackBox(file.fd, batch, 0)
    plain, watched = _engine(config, batch), _engine(config, batch, box)
    box.watch(watched.scheduler)
    for engine in (plain, watched):
        engine.step([(1, _request(number)) for number in range(batch)], 0)
    seconds: list[list[float]] = [[], []]
    for _ in range(_NUM_PAIRS):
        for which, (engine, turn) in enumerate(((plain, None), (watched, box.turn))):
            begin = time.perf_counter()
            engine.step([], time.monotonic_ns())
            if turn is not None:
                turn(0)
            seconds[which].append(time.perf_counter() - begin)
    without, with_box = (statistics.median(one) * 1e6 for one in seconds)
    return {
        "batch": batch,
        "box_us": round(with_box - without, 2),
        "step_us": round(without, 1),
        "watched_step_us": round(with_box, 1),
        "ratio": round(with_box / without, 3),
    }


def _engine(config: EngineConfig, batch: int, *watchers: Any) -> EngineCore:
    """Return an engine with so many rows."""
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
