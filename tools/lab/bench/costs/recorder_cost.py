"""The cost of the flight recorder: steps with and without it, turn about; how long a checkpoint stops the engine."""

import statistics
import time
from typing import Any

import msgspec
import numpy as np

from core.capture.early_copies import EarlyCopies
from core.capture.engine import CapturedEngine, make_header
from core.capture.flight_recorder import FlightRecorder
from core.capture.snapshot import CopySpace, Snapshot
from core.engine import EngineCore
from core.executors.by_name import load_executor
from core.process.resolve import resolve
from ipc.options.config import EngineConfig
from ipc.options.resolved import ResolvedConfig
from ipc.records.flight_ring import FlightFile
from ipc.version import NAME, VERSION
from ipc.wire.messages import AddRequest
from tools.lab.bench.runs import request_params

BATCHES = (1, 32, 256)
_NUM_RUNS = 300  # with a recorder, and the same number without
_SETTLE_S = 2.0  # in which the recorder's thread touches the pages of its memory
_STEPS_OF_RUN = 9  # twice this is not a multiple of a block's tokens, so both see every step of a block
#: Rows and waiting requests of the engines whose checkpoints are measured.
SIZES = ((1, 0), (32, 0), (32, 1000), (200, 1000), (256, 1000))
_NUM_CHECKPOINTS = 30
_PROMPT_TOKENS = 500


def measure_recorder(config: EngineConfig, *, rep: int) -> list[dict[str, Any]]:
    """Return a record for each batch size: medians of steps with and without a recorder, and the differences."""
    names = {
        "engine": NAME,
        "version": VERSION,
        "workload": "flight recorder",
        "rep": rep,
        "steps": _NUM_RUNS * _STEPS_OF_RUN,
    }
    return [{**names, **_measure_steps(config, batch)} for batch in BATCHES]


def measure_checkpoint(config: EngineConfig, *, rep: int) -> list[dict[str, Any]]:
    """Return a record for each size: how long the engine stops for a checkpoint, its encoding and its bytes."""
    names = {"engine": NAME, "version": VERSION, "workload": "checkpoint", "rep": rep}
    return [{**names, **_measure_checkpoint(config, rows, waiting)} for rows, waiting in SIZES]


def _measure_steps(config: EngineConfig, batch: int) -> dict[str, Any]:
    """Measure runs of steps of one engine, turn about with the recorder and without it: two engines would differ by
    more.
    """
    resolved = _resolved(config, batch)
    executor = _executor(resolved)
    ring = FlightFile(1 << 24)
    recorder = FlightRecorder(ring.fd, make_header(resolved, executor.info, VERSION, 0), 3600)
    recorded = CapturedEngine(resolved, executor, recorder)
    plain, pipeline = recorded.engine, recorded.engine.pipeline
    recorded.step([(1, _request(number, 16)) for number in range(batch)], time.monotonic_ns())
    time.sleep(_SETTLE_S)
    watchers, seconds = pipeline.watchers, (list[float](), list[float]())
    engines: tuple[EngineCore | CapturedEngine, ...] = (plain, recorded)
    for _ in range(_NUM_RUNS):
        for engine, its_watchers, its_seconds in zip(engines, ((), watchers), seconds, strict=True):
            pipeline.watchers = its_watchers
            for _ in range(_STEPS_OF_RUN):
                begin = time.perf_counter()
                engine.step([], time.monotonic_ns())
                its_seconds.append(time.perf_counter() - begin)
    recorder.close()
    without, with_it = (statistics.median(one) * 1e6 for one in seconds)
    return {
        "batch": batch,
        "recorder_us": round(with_it - without, 2),
        "step_us": round(without, 1),
        "recorded_step_us": round(with_it, 1),
    }


def _measure_checkpoint(config: EngineConfig, rows: int, waiting: int) -> dict[str, Any]:
    resolved = _resolved(config, rows)
    engine = EngineCore(resolved, _executor(resolved))
    for number in range(rows + waiting):
        engine.step([(1, _request(number, _PROMPT_TOKENS))], number)
    for step in range(100):
        engine.step([], 10_000 + step)
    stops, parts, encodes, size, space = list[float](), list[float](), list[float](), 0, CopySpace()
    Snapshot(engine.state(), space).encode()
    for _ in range(_NUM_CHECKPOINTS):
        early = EarlyCopies(engine.scheduler.waiting.entries())
        while True:
            engine.step([], time.monotonic_ns())
            if early.is_done:
                break
            begin = time.perf_counter()
            early.copy_some()
            parts.append((time.perf_counter() - begin) * 1e3)
        begin = time.perf_counter()
        snapshot = Snapshot(engine.state(), space, early)
        stops.append((time.perf_counter() - begin) * 1e3)
        begin = time.perf_counter()
        size = len(snapshot.encode())
        encodes.append((time.perf_counter() - begin) * 1e3)
        del snapshot, early
    return {
        "rows": rows,
        "waiting": engine.count_waiting()[0],
        "stop_ms": round(statistics.median(stops), 3),
        "longest_stop_ms": round(max(stops), 3),
        "early_copies_ms": round(statistics.median(parts), 3) if parts else 0.0,
        "encode_ms": round(statistics.median(encodes), 1),
        "bytes": size,
    }


def _resolved(config: EngineConfig, batch: int) -> ResolvedConfig:
    sizes = {"max_num_seqs": batch, "max_num_batched_tokens": 32_768, "num_blocks_override": max(4096, batch * 64)}
    config = msgspec.structs.replace(config, **sizes)
    executor = load_executor(config)
    blocks_in = executor.determine_num_available_blocks
    return resolve(config, executor.info, blocks_in, total_memory_bytes=1 << 36, num_cpus=1)


def _executor(config: ResolvedConfig) -> Any:
    executor = load_executor(config)
    executor.initialize_cache(config)
    return executor


def _request(number: int, num_tokens: int) -> AddRequest:
    prompt = np.arange(20 + number, 20 + number + num_tokens, dtype="<i4") % 1000
    return AddRequest(number, prompt.tobytes(), request_params(100_000), seed=0)
