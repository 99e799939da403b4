"""Captures to test with: a workload with aborts, preemptions and prefix hits, files with one thing changed, replays."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from core.capture.engine import CapturedEngine, start_capture
from core.capture.records import TAGS, Input, Record, Step, decode_record, encode_record
from core.executors.by_name import load_executor
from core.inputs import EngineInput
from ipc.options.resolved import ResolvedConfig
from ipc.params.sampling_params import SamplingParams
from ipc.records.log_frames import Frame, pack_frame, read_frames
from ipc.wire.messages import Abort, AddRequest, GetStatistics, Goodbye, ResetPrefixCache
from tests.columns import pack_numbers
from tests.fake_options import fake_options
from tests.resolved import resolved_config
from tools.cli import main

VOCAB = 1000
NUM_REQUESTS = 30
SHARED = list(range(100, 124))  # three blocks that a third of the prompts begin with

CONFIG = resolved_config(
    executor_options=fake_options(vocab_size=VOCAB, max_model_len=200),
    max_model_len=120,
    max_num_seqs=8,
    max_num_batched_tokens=48,
    block_size=8,
    num_blocks_override=24,
)


def make_request(number: int, rng: random.Random) -> AddRequest:
    own = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 40))]
    prompt = [*SHARED, *own] if number % 3 == 0 else own
    params = SamplingParams(
        temperature=0.8 if number % 2 else 0.0, max_tokens=rng.randrange(1, 40), stop_token_ids=[5, 6, 7]
    )
    return AddRequest(number, np.array(prompt, "<i4").tobytes(), params, seed=rng.getrandbits(64))


def capture_in_process(
    path: Path,
    config: ResolvedConfig = CONFIG,
    make: Callable[[int, random.Random], AddRequest] = make_request,
) -> CapturedEngine:
    """Three clients; the last one leaves before it is done. make: the request of a number."""
    rng = random.Random(7)
    executor = load_executor(config)
    executor.initialize_cache(config)
    writer = start_capture(str(path), config, executor.info, "test", 0)
    engine = CapturedEngine(config, executor, writer)
    number, now_ns = 0, 10**12
    while number < NUM_REQUESTS or engine.has_work:
        inbox: list[tuple[int, EngineInput]] = []
        for _ in range(rng.randrange(3) if number < NUM_REQUESTS else 0):
            inbox.append((number % 3, make(number, rng)))
            number += 1
        if rng.random() < 0.1:
            inbox.append((rng.randrange(3), Abort(pack_numbers([rng.randrange(NUM_REQUESTS)]))))
        if number == NUM_REQUESTS // 2:
            inbox += [(0, ResetPrefixCache(1)), (1, GetStatistics(2))]
        if number >= NUM_REQUESTS and rng.random() < 0.1:
            inbox.append((2, Goodbye()))
        now_ns += 1_000_000
        if inbox or engine.has_work:
            engine.step(inbox, now_ns)
    writer.close()
    executor.close()
    return engine


def frames_of(path: Path) -> list[Frame]:
    return list(read_frames(path.read_bytes()))


def write_frames(path: Path, frames: list[Frame]) -> None:
    path.write_bytes(b"".join(pack_frame(frame.sequence, frame.tag, frame.payload) for frame in frames))


def change(path: Path, place: int, alter: Callable[[Record], Record]) -> None:
    """Rewrite one record, with a right checksum."""
    frames = frames_of(path)
    record = decode_record(frames[place].tag, frames[place].payload)
    assert record is not None
    frames[place] = frames[place]._replace(payload=encode_record(alter(record)))
    write_frames(path, frames)


def replaced(**fields: object) -> Callable[[Record], Record]:
    return lambda record: msgspec.structs.replace(record, **fields)


def replay(capfd: pytest.CaptureFixture[str], path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """(exit status, the --json record)."""
    capfd.readouterr()
    status = main(["replay", str(path), "--json", *options])
    out = capfd.readouterr().out
    return status, json.loads(out) if out else {}


def error(capfd: pytest.CaptureFixture[str], path: Path, *options: str) -> tuple[int, str]:
    """(exit status, the one line of the error)."""
    capfd.readouterr()
    status = main(["replay", str(path), *options])
    (line,) = capfd.readouterr().err.splitlines()
    return status, line


def find(path: Path, kind: type[Step] | type[Input], accept: Callable[[Any], bool], skip: int = 0) -> int:
    """Place of a frame."""
    for place, frame in enumerate(frames_of(path)):
        if frame.tag == TAGS[kind] and accept(decode_record(frame.tag, frame.payload)):
            if not skip:
                return place
            skip -= 1
    raise AssertionError("no such record")


def step_index(path: Path, place: int) -> int:
    return sum(frame.tag == TAGS[Step] for frame in frames_of(path)[:place])
