"""The cost of --capture: the same load with and without it, alternating, on the fake executor; ratios of medians."""

import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from core.capture.engine import CapturedEngine, start_capture
from core.capture.writer import CaptureWriter
from core.engine import EngineCore
from core.executors.by_name import load_executor
from core.process.resolve import resolve
from frontend.engine.process import EngineProcess
from ipc.options.config import EngineConfig
from ipc.version import NAME, VERSION
from ipc.wire.messages import AddRequest
from tools.lab.bench.ipc import NUM_STREAMS, Connections, streaming_seconds
from tools.lab.bench.runs import request_params

BATCHES = (1, 32, 256)
_NUM_PAIRS = 20
_STEPS_PER_ROUND = 50
_TOKENS_PER_ROUND = 200  # of each stream


def measure_capture(config: EngineConfig, *, rep: int) -> list[dict[str, Any]]:
    """Return a record for each batch size (steps in this process), and one for an engine process (tokens/s)."""
    with tempfile.TemporaryDirectory(prefix="engine-core-bench-") as folder:
        records = [_measure_steps(config, batch, Path(folder)) for batch in BATCHES]
        records.append(_measure_process(config, Path(folder)))
    names = {"engine": NAME, "version": VERSION, "rep": rep, "pairs": _NUM_PAIRS}
    return [{**names, **record} for record in records]


def _measure_steps(config: EngineConfig, batch: int, folder: Path) -> dict[str, Any]:
    path = folder / f"steps-{batch}"
    plain_engine, captured_engine, writer = _engines(config, batch, path)
    engines: tuple[EngineCore | CapturedEngine, ...] = (plain_engine, captured_engine)
    seconds: list[list[float]] = [[], []]
    for _ in range(_NUM_PAIRS):
        for which, engine in enumerate(engines):
            for _ in range(_STEPS_PER_ROUND):
                begin = time.perf_counter()
                engine.step([], time.monotonic_ns())
                seconds[which].append(time.perf_counter() - begin)
    writer.close()
    plain, captured = (statistics.median(one) * 1e6 for one in seconds)
    num_steps = (_NUM_PAIRS * _STEPS_PER_ROUND) + 1
    return {
        "workload": "capture steps",
        "batch": batch,
        "step_us": round(plain, 1),
        "captured_step_us": round(captured, 1),
        "ratio": round(captured / plain, 3),
        "bytes_per_step": round(path.stat().st_size / num_steps, 1),
    }


def _engines(config: EngineConfig, batch: int, path: Path) -> tuple[EngineCore, CapturedEngine, CaptureWriter]:
    """Return an engine without a capture and one with it, both in the middle of `batch` long requests."""
    config = msgspec.structs.replace(config, max_num_seqs=batch, max_num_batched_tokens=8192)
    executors = [load_executor(config), load_executor(config)]
    info, blocks_in = executors[0].info, executors[0].determine_num_available_blocks
    config = resolve(config, info, blocks_in, total_memory_bytes=1 << 36, num_cpus=1)
    for executor in executors:
        executor.initialize_cache(config)
    writer = start_capture(str(path), config, info, VERSION, 0)
    plain, captured = EngineCore(config, executors[0]), CapturedEngine(config, executors[1], writer)
    for engine in (plain, captured):
        engine.step([(1, _request(number)) for number in range(batch)], 0)
    return plain, captured, writer


def _request(number: int) -> AddRequest:
    prompt = np.arange(20 + number, 36 + number, dtype="<i4")
    return AddRequest(number, prompt.tobytes(), request_params(100_000), seed=0)


def _measure_process(config: EngineConfig, folder: Path) -> dict[str, Any]:
    path = folder / "process"
    rates: list[list[float]] = [[], []]
    with ExitStack() as stack:
        configs = (config, msgspec.structs.replace(config, capture=str(path)))
        processes = [stack.enter_context(EngineProcess(one)) for one in configs]
        connections = [stack.enter_context(Connections(process.address, 1)) for process in processes]
        for number in range(_NUM_PAIRS + 1):  # the first is a warm-up
            for which, one in enumerate(connections):
                rate = NUM_STREAMS * _TOKENS_PER_ROUND / streaming_seconds(one, _TOKENS_PER_ROUND)
                if number:
                    rates[which].append(rate)
    plain, captured = map(statistics.median, rates)
    num_tokens = (_NUM_PAIRS + 1) * NUM_STREAMS * _TOKENS_PER_ROUND
    return {
        "workload": "capture tokens",
        "streams": NUM_STREAMS,
        "out_tok_s": round(plain),
        "captured_out_tok_s": round(captured),
        "ratio": round(captured / plain, 3),
        "quartiles": [[round(value) for value in statistics.quantiles(one, n=4)] for one in rates],
        "bytes_per_token": round(path.stat().st_size / num_tokens, 1),
    }
