"""Checkpoints: a replay from each of them makes the decisions of the engine that went on. That engine is the oracle."""

import itertools
import os
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from core.batch.request import Request, request_from_message
from core.capture import early_copies
from core.capture import writer as capture_writer
from core.capture.early_copies import EarlyCopies
from core.capture.engine import CapturedEngine, start_capture
from core.capture.file import CaptureFile
from core.capture.restore import restore
from core.capture.snapshot import Snapshot
from core.capture.state_classes import UnknownObjectError
from core.engine import EngineCore
from core.executors.by_name import load_executor
from core.inputs import EngineInput, HoldClient, ReleaseClient
from ipc.errors import CaptureFileError
from ipc.options.config import EngineConfig
from ipc.options.speculation import SpeculativeConfig
from ipc.params.pooling_params import PoolingParams
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import Abort, AddRequest, Pause, PauseMode, Resume
from ipc.wire.pooling_messages import AddPooling
from ipc.wire.scheduling_messages import FollowKVEvents
from tests.captures import CONFIG, make_request
from tests.columns import pack_numbers
from tests.fake_options import fake_options, with_options
from tools.commands.replay.__main__ import main
from tools.commands.replay.rerun import Replay, recorded_executor, replay_config

#: Options that give the scheduler other states.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "deep": {"async_scheduling": True},
    "fair": {"scheduling_policy": "fair", "fair_quantum": 16},
    "priority": {"scheduling_policy": "priority", "async_scheduling": True},
    "swap": {"preemption_mode": "swap", "num_swap_blocks": 12, "num_blocks_override": 18},
    "whole": {"enable_chunked_prefill": False, "max_num_batched_tokens": 120},
    "limits": {"max_num_partial_prefills": 1, "scheduler_delay_factor": 1.5, "num_blocks_override": 16},
    "drafts": {"speculative_config": SpeculativeConfig(method="ngram", num_speculative_tokens=3)},
    "suffix": {
        "speculative_config": SpeculativeConfig(
            method="suffix",
            num_speculative_tokens=3,
            suffix_decoding_max_cached_requests=20,  # fewer than the run has, and a tenth of the time of a checkpoint
        )
    },
    "pairs": {
        "async_scheduling": True,
        "speculative_config": SpeculativeConfig(
            method="ngram", num_speculative_tokens=3, step_ns=(900_000, 950_000, 1_000_000, 1_100_000)
        ),
    },
    "turns": {"pipeline_parallel_size": 2, "async_scheduling": True},
    "adapters": {"enable_lora": True, "max_loras": 2},
    "several": {"executor_options": fake_options(tokens_per_step=3), "enable_prefix_caching": False},
    "window": {"kv_window": 48, "num_blocks_override": 24},
    "pages": {"kv_window": 48, "kv_page_blocks": 3, "num_blocks_override": 36},
}


def make_any(number: int, rng: random.Random) -> AddRequest | AddPooling:
    """Plain requests, several choices, beam searches and embeddings, with salts, tenants, priorities and deadlines."""
    message = make_request(number, rng)
    if number % 11 == 4:
        return AddPooling(number, message.prompt_token_ids, PoolingParams(task="embed"))
    changes: dict[str, Any] = {
        "priority": rng.randrange(-2, 3),
        "cache_salt": rng.choice(["", "", "a"]),
        "tenant": rng.choice(["", "one", "two"]),
        "deadline_ms": rng.choice([0, 0, 30]),
    }
    if number % 5 == 2:
        changes["params"] = SamplingParams(n=3, temperature=0.9, max_tokens=rng.randrange(1, 20))
    elif number % 7 == 3:
        changes["params"] = SamplingParams(use_beam_search=True, n=2, temperature=0, max_tokens=rng.randrange(1, 12))
    return msgspec.structs.replace(message, **changes)


def other_inputs(rng: random.Random) -> list[tuple[int, EngineInput]]:
    """What clients and the border do beside requests."""
    kinds: list[Callable[[], EngineInput]] = [
        HoldClient,
        ReleaseClient,
        lambda: Pause(1, PauseMode.NEW),
        lambda: Resume(2),
        lambda: FollowKVEvents(3),
    ]
    return [(rng.randrange(3), rng.choice(kinds)())] if rng.random() < 0.15 else []


def capture(
    path: Path,
    config: EngineConfig,
    seed: int,
    num_steps: int,
    make: Callable[[int, random.Random], AddRequest | AddPooling] = make_any,
    prepare: Callable[[Any], None] = lambda _: None,
) -> None:
    """Write a capture of a run with all kinds of requests and of messages beside them.

    make: a number's request. prepare: gets the executor before it is used.
    """
    rng = random.Random(seed)
    executor = load_executor(config)
    prepare(executor)
    executor.initialize_cache(config)
    writer = start_capture(str(path), config, executor.info, "test", 0)
    engine = CapturedEngine(config, executor, writer)
    number = 0
    for index in range(num_steps):
        inbox = other_inputs(rng)
        for _ in range(rng.choice([0, 0, 1, 2])):
            inbox.append((number % 3, make(number, rng)))
            number += 1
        engine.step(inbox, 10**12 + index * 1_000_000)
        engine.engine.scheduler.check_integrity()
    writer.close()
    executor.close()


def replay_from_each(path: Path, most_steps: int | None = 10) -> int:
    """Replay a file from its beginning and from each checkpoint; return the number of checkpoints.

    most_steps: after all checkpoints but the first, which is replayed to the end; None: all are. What a checkpoint
    lacks shows within a few steps, and replays to the end take the square of a file's length.
    """
    file = CaptureFile(path)
    config = replay_config(file.header)
    for index, place in enumerate((None, *file.checkpoints)):
        replay = Replay(file, config, recorded_executor(file), place)
        num_steps = 0
        for _, difference, _ in itertools.islice(replay.steps(), most_steps if index > 1 else None):
            assert difference is None, (place, difference)
            num_steps += 1
        left = file.num_steps - (0 if place is None else place.num_steps - file.first_step)
        assert num_steps == (left if index <= 1 or most_steps is None else min(left, most_steps))
    return len(file.checkpoints)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_writer, "CHECKPOINT_BYTES", 8000)
    monkeypatch.setattr(capture_writer, "CLOSE_S", 60.0)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("name", VARIANTS)
def test_a_replay_from_each_checkpoint_decides_as_the_engine_that_went_on(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.cap"
    capture(path, with_options(CONFIG, **VARIANTS[name]), seed=6, num_steps=80)  # no pause
    assert replay_from_each(path) >= 2


@pytest.mark.soak
@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("seed", range(int(os.environ.get("SOAK_CHECKPOINTS", "60"))))
def test_random_captures_replay_from_each_checkpoint(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    config = with_options(CONFIG, **VARIANTS[rng.choice(list(VARIANTS))], max_num_seqs=rng.choice([2, 4, 8]))
    capture(tmp_path / "a.cap", config, seed, num_steps=400)
    assert replay_from_each(tmp_path / "a.cap", None) >= 3


def test_a_long_beam_search_is_no_deep_one(tmp_path: Path) -> None:
    """Its tokens are chains of links, longer than Python's stack is deep."""
    config = with_options(
        CONFIG, max_model_len=1500, executor_options=fake_options(max_model_len=1500), num_blocks_override=800
    )
    params = SamplingParams(use_beam_search=True, n=3, temperature=0, max_tokens=700, ignore_eos=True)

    executor = load_executor(config)
    executor.initialize_cache(config)
    engine = EngineCore(config, executor)
    engine.step([(0, AddRequest(0, np.array([5, 6, 7], "<i4").tobytes(), params, seed=0))], 1)
    for step in range(600):
        engine.step([], 2 + step)
    other = EngineCore(config, executor)
    other.take_over(restore(Snapshot(engine.state()).encode()))
    assert other.scheduler.get_request_counts() == (3, 0)
    assert Snapshot(other.state()).encode()


def test_files_rotate_and_each_replays_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_writer, "CLOSE_S", 60.0)
    path = tmp_path / "a.cap"
    capture(path, msgspec.structs.replace(CONFIG, capture_rotate_bytes=6000, capture_keep_files=3), 2, num_steps=200)
    files = sorted(tmp_path.iterdir(), key=lambda one: CaptureFile(one).first_step)
    assert len(files) == 3
    assert path not in files
    ends = 0
    for one in files:
        file = CaptureFile(one)
        assert file.begins_inside
        assert file.close is not None
        assert file.first_step == ends or not ends
        ends = file.first_step + file.num_steps
        assert main([str(one)]) == 0
    assert ends == 200


def test_a_file_that_begins_inside_says_what_it_cannot_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(capture_writer, "CLOSE_S", 60.0)
    path = tmp_path / "a.cap"
    capture(path, msgspec.structs.replace(CONFIG, capture_rotate_bytes=20_000), 2, num_steps=150)
    second = f"{path}-2"
    for options in (["--mode", "full"], ["--what-if", "max_num_seqs=2"], ["--mode", "live", "--connect", "ipc:///x"]):
        assert main([second, *options]) == 4
        assert "begins with a checkpoint at step" in capsys.readouterr().err


def test_a_checkpoint_that_is_no_engines_is_refused() -> None:
    for data in (b"", b"nonsense"):
        with pytest.raises(CaptureFileError, match="a checkpoint that"):
            restore(data)
    engine = EngineCore(CONFIG, load_executor(CONFIG))
    whole = Snapshot(engine.state()).encode()
    with pytest.raises(CaptureFileError):
        restore(whole[:-20])
    with pytest.raises(UnknownObjectError, match="os:"):
        Snapshot([os.stat("/")])
    state = restore(whole)
    state[1].check_integrity()


def canonical(data: bytes) -> bytes:
    """A snapshot's bytes with its objects in the order in which they are found from the root."""
    return zlib.decompress(Snapshot(restore(data)).encode())


def queueing_engine(name: str, seed: int, num_steps: int) -> tuple[EngineCore, Callable[[], None]]:
    """An engine with some forty waiting requests, and what runs its next step."""
    rng = random.Random(seed)
    config = with_options(CONFIG, **{**VARIANTS[name], "max_num_seqs": 3})
    executor = load_executor(config)
    executor.initialize_cache(config)
    engine, count = EngineCore(config, executor), itertools.count()

    def step() -> None:
        inbox = other_inputs(rng)
        number = next(count)
        if number < 40 or rng.random() < 0.3:
            inbox.append((number % 3, make_any(number, rng)))
        if rng.random() < 0.1:
            inbox.append((rng.randrange(3), Abort(pack_numbers([rng.randrange(number + 1)]))))
        engine.step(inbox, 10**12 + number * 1_000_000)

    for _ in range(num_steps):
        step()
    return engine, step


@pytest.mark.parametrize("name", ["plain", "fair", "priority", "swap"])
def test_early_copies_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that are some steps old, and a snapshot that has them: the same state as without."""
    monkeypatch.setattr(early_copies, "_MOST", 7)
    num_old = 0
    for seed in range(2):
        engine, step = queueing_engine(name, seed, 45)
        for _ in range(3):
            early = EarlyCopies(engine.scheduler.waiting.entries())
            while not early.is_done:
                early.copy_some()
                step()
            num_old += len(early.valid()[1])
            data = Snapshot(engine.state(), early=early).encode()
            assert canonical(data) == canonical(Snapshot(engine.state()).encode())
    assert num_old > 10, "nothing that was copied early was used"


def test_what_changes_in_a_waiting_request_unseen_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above sees each field that a step may change without a new ticket."""
    rng, engine = random.Random(1), EngineCore(CONFIG, load_executor(CONFIG))
    for number in range(20):
        message = msgspec.structs.replace(make_request(number, rng), params=SamplingParams(max_tokens=30))
        engine.scheduler.add_request([request_from_message(message, 0, number, 120)], 1, 0)
    for field in Request.__struct_fields__:
        early = EarlyCopies(engine.scheduler.waiting.entries())
        early.copy_some()
        (request, _), *_ = early.valid()[1]
        before = getattr(request, field)
        if type(before) is not int or field in ("client", "number"):
            continue
        monkeypatch.setattr(request, field, before + 1)
        data = Snapshot(engine.state(), early=early).encode()
        is_same = canonical(data) == canonical(Snapshot(engine.state()).encode())
        assert is_same == (field in ("ticket", "num_overtaken", "awaits")), field
        monkeypatch.undo()


def test_a_checkpoint_that_is_copied_early_comes_some_steps_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_copies, "_MOST", 5)
    monkeypatch.setattr(capture_writer, "CHECKPOINT_BYTES", 9000)
    monkeypatch.setattr(capture_writer, "CLOSE_S", 60.0)
    path, rng = tmp_path / "a.cap", random.Random(2)
    config = msgspec.structs.replace(CONFIG, max_num_seqs=2)
    executor = load_executor(config)
    executor.initialize_cache(config)
    writer = start_capture(str(path), config, executor.info, "test", 0)
    engine = CapturedEngine(config, executor, writer, copies_early=True)
    num_due = 0
    for index in range(160):
        engine.step([(index % 3, make_request(index, rng))] if index < 60 else [], 10**12 + index * 1_000_000)
        num_due += writer.wants_checkpoint
    writer.close()
    assert replay_from_each(path) >= 2
    assert num_due > 8, "the checkpoints came at once"
