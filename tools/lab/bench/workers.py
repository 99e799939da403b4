"""Workers: what a step costs with its model in parts, compared with one process of as many threads, and what a death
costs.

For the first, both engines run in this process and take turns decoding: a step of one is compared with the next step of
the other. If steps overlap, in stages of a pipeline, several tokens of each row are compared, between pauses in which
nothing runs. The second kills the workers of an engine under streams repeatedly.
"""

import os
import signal
import statistics
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from core.engine import EngineCore
from core.execution.executor import MortalExecutor
from core.executors.by_name import load_executor
from core.executors.fake_options import with_fake_options
from core.inputs import EngineInput
from core.process.resolve import resolve
from core.workers.executor import WorkersExecutor
from ipc.machine.memory import usable_memory_bytes
from ipc.options.config import EngineConfig
from ipc.options.workers import in_one_process, most_in_flight, num_workers
from ipc.params.sampling_params import SamplingParams
from ipc.version import NAME, VERSION
from ipc.wire.messages import AddRequest, Outputs

SIZES = (1, 8, 32)
_PROMPT = 64  # tokens
_TURNS = 60  # steps of each engine
_BLOCKS, _BLOCK_TOKENS = 5, 20  # turns of each engine if steps overlap, and tokens of each row in a turn
_PAUSE_S = 0.3  # longer than a step
_NUM_KILLS, _NUM_STREAMS = 6, 8
_RUN_S = 0.3  # between the end of a pause and the next kill
_LIMIT_S = 60.0


class _Decoding:
    """One engine core, and rows that decode."""

    def __init__(self, config: EngineConfig) -> None:
        self.executor = load_executor(config)
        self.news: list[tuple[int, EngineInput]] = []
        if isinstance(self.executor, MortalExecutor):
            self.executor.follow(lambda one: self.news.append((0, one)))
        info, blocks_in = self.executor.info, self.executor.determine_num_available_blocks
        resolved = resolve(config, info, blocks_in, total_memory_bytes=usable_memory_bytes(), num_cpus=1)
        self.executor.initialize_cache(resolved)
        self.executor.warm_up()
        self.engine = EngineCore(resolved, self.executor)
        self._max_tokens, self._num_sent, self.num_tokens = resolved.max_model_len - _PROMPT, 0, 0

    def begin(self, num_rows: int) -> None:
        """Let this many rows decode; their prompts are computed before this returns."""
        generator = np.random.default_rng(num_rows)
        params = SamplingParams(max_tokens=self._max_tokens, ignore_eos=True, temperature=0.0)
        inbox: list[tuple[int, EngineInput]] = []
        for _ in range(num_rows):
            prompt = generator.integers(5, 1000, _PROMPT).astype("<i4").tobytes()
            inbox.append((self._num_sent, AddRequest(0, prompt, params, 0)))
            self._num_sent += 1
        self.engine.step(inbox, time.monotonic_ns())
        while self.engine.count_waiting()[0]:
            self.step()
        self._run_for(8 * num_rows)

    def step(self) -> float:
        """Run a step, and return its seconds."""
        begin = time.perf_counter()
        inbox, taken = list(self.news), len(self.news)
        del self.news[:taken]
        for _, reply in self.engine.step(inbox, time.monotonic_ns()):
            if isinstance(reply, Outputs):
                self.num_tokens += len(reply.tokens) // 4
        return time.perf_counter() - begin

    def block(self, num_rows: int) -> float:
        """Run until each row has _BLOCK_TOKENS more tokens; return the seconds of one of them, with full stages.

        Steps in flight at the end finish before this returns.
        """
        self._run_for(num_rows)
        begin = time.perf_counter()
        self._run_for(num_rows * _BLOCK_TOKENS)
        seconds = time.perf_counter() - begin
        time.sleep(_PAUSE_S)
        return seconds / _BLOCK_TOKENS

    def _run_for(self, num_tokens: int) -> None:
        end = self.num_tokens + num_tokens
        while self.num_tokens < end:
            self.step()

    def end(self) -> None:
        """End all rows."""
        for client in range(self._num_sent):
            self.engine.scheduler.finish_client(client)
        self.step()

    def close(self) -> None:
        """Stop the workers."""
        self.executor.close()


def measure_workers(config: EngineConfig, rep: int) -> Iterator[dict[str, Any]]:
    """Yield a record for each size of a batch, and one for kills.

    config: tensor_parallel_size, pipeline_parallel_size = of the workers, 2 ranks if both are 1; threads = of each
    worker, 1 by default.
    """
    threads, size, stages = config.threads or 1, config.tensor_parallel_size, config.pipeline_parallel_size
    if num_workers(config) == 1:
        size = 2
    base = {"max_num_seqs": max(SIZES), "max_model_len": 512}
    parts = msgspec.structs.replace(config, **base, threads=threads, tensor_parallel_size=size)
    whole = msgspec.structs.replace(in_one_process(config), **base, threads=threads * size * stages)
    shape = {"ranks": size, "stages": stages, "threads": threads}
    names = {"engine": NAME, "version": VERSION, "workload": "workers", "rep": rep}
    ranks, alone = _Decoding(parts), _Decoding(whole)
    try:
        if ranks.executor.info.fingerprint != alone.executor.info.fingerprint:
            raise AssertionError(f"{ranks.executor.info} and {alone.executor.info}")
        for rows in SIZES:
            yield {**names, **shape, "rows": rows, **_compare(ranks, alone, rows, overlaps=most_in_flight(parts) > 1)}
    finally:
        ranks.close()
        alone.close()
    yield {**names, "executor": config.executor, "kills": _NUM_KILLS, "streams": _NUM_STREAMS, **_deaths(config)}


def _compare(ranks: _Decoding, alone: _Decoding, rows: int, *, overlaps: bool) -> dict[str, float]:
    for one in (ranks, alone):
        one.begin(rows)
    if overlaps:
        pairs = [(ranks.block(rows), alone.block(rows)) for _ in range(_BLOCKS)]
    else:
        pairs = [(ranks.step(), alone.step()) for _ in range(_TURNS)]
    for one in (ranks, alone):
        one.end()
    parts, whole = (sorted(values) for values in zip(*pairs, strict=True))
    return {
        "workers_ms_p50": round(statistics.median(parts) * 1e3, 3),
        "one_process_ms_p50": round(statistics.median(whole) * 1e3, 3),
        "speed": round(statistics.median(whole) / statistics.median(parts), 3),
        "speed_of_pairs": round(statistics.median(other / own for own, other in pairs), 3),
    }


def _deaths(config: EngineConfig) -> dict[str, float]:
    """Return the pauses of streams whose worker is killed, in ms."""
    workers = msgspec.structs.replace(config, distributed_executor_backend="mp", max_num_seqs=_NUM_STREAMS)
    decoding = _Decoding(msgspec.structs.replace(with_fake_options(workers, step_us=1000), max_model_len=2048))
    executor = decoding.executor
    assert isinstance(executor, WorkersExecutor), executor
    pauses = []
    try:
        decoding.begin(_NUM_STREAMS)
        for _ in range(_NUM_KILLS):
            executor.forget_losses()
            _run(decoding, _RUN_S)
            os.kill(executor.pids[-1], signal.SIGKILL)
            begin, before = time.monotonic(), decoding.num_tokens
            # A step that ran at that moment may still deliver its tokens; later ones come from the next workers.
            while decoding.num_tokens <= before + _NUM_STREAMS:
                if time.monotonic() - begin > _LIMIT_S:
                    raise TimeoutError(f"the workers did not come back within {_LIMIT_S:g} s")
                if not decoding.engine.has_work:
                    time.sleep(0.001)
                decoding.step()
            pauses.append(time.monotonic() - begin)
    finally:
        decoding.close()
    return {
        "pause_ms_p50": round(statistics.median(pauses) * 1e3, 1),
        "pause_ms_max": round(max(pauses) * 1e3, 1),
    }


def _run(decoding: _Decoding, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        decoding.step()
