"""Pins in captures: a replay from each checkpoint decides the same, and so does one of a redacted file."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from core.batch import kept_states
from core.batch.kept_states import KeptStates
from core.capture import writer as capture_writer
from core.capture.file import CaptureFile
from core.capture.redaction import redact
from core.inputs import EngineInput
from ipc.options.resolved import ResolvedConfig
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest, ResetPrefixCache
from ipc.wire.pin_messages import ForkPin, GetPins, Pin, ReleasePin
from ipc.wire.pooling_messages import AddPooling
from tests.captures import CONFIG
from tests.core.capture import test_checkpoints
from tests.core.capture.test_checkpoints import VARIANTS, capture, make_any, replay_from_each
from tests.core.capture.test_redaction import contents, decisions
from tests.fake_options import with_options
from tools.commands.replay.rerun import recorded_executor, replay_config, rerun


def make_pinned(number: int, rng: random.Random) -> AddRequest | AddPooling:
    message = msgspec.structs.replace(make_any(number, rng), tenant="tenant-canary" if number % 2 else "")
    if not isinstance(message, AddRequest):
        return message
    if message.params.use_beam_search:  # beams at a file's first checkpoint cannot be renamed
        message = msgspec.structs.replace(message, params=SamplingParams(max_tokens=9))
    name, ttl_ms = rng.choice(["", "pin-canary-a", "pin-canary-b"]), rng.choice([3, 30])
    pins = [Pin(name, ttl_ms, is_required=rng.random() < 0.2)] if rng.random() < 0.6 else []
    return msgspec.structs.replace(message, pins=tuple(pins))


def pin_calls(rng: random.Random) -> list[tuple[int, EngineInput]]:
    one, other = rng.sample(["pin-canary-a", "pin-canary-b", "pin-canary-c"], 2)
    calls = [ReleasePin(1, one, "tenant-canary"), ForkPin(2, one, other, 20), GetPins(3), ResetPrefixCache(4)]
    return [(0, rng.choice(calls))] if rng.random() < 0.2 else []


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_writer, "CHECKPOINT_BYTES", 6000)
    monkeypatch.setattr(capture_writer, "CLOSE_S", 60.0)
    monkeypatch.setattr(test_checkpoints, "other_inputs", pin_calls)


def config_of(**options: Any) -> ResolvedConfig:
    return with_options(CONFIG, max_pinned_share=0.8, max_tenant_pinned_share=0.6, **options)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("name", ["plain", "deep", "priority", "pages"])
def test_a_replay_from_each_checkpoint_has_the_pins(tmp_path: Path, name: str) -> None:
    path, out = tmp_path / "a.cap", tmp_path / "red.cap"
    capture(path, config_of(**VARIANTS[name]), seed=5, num_steps=80, make=make_pinned)
    assert replay_from_each(path) >= 2
    redact(CaptureFile(path), str(out))
    assert decisions(out) == decisions(path)
    assert replay_from_each(out) == len(CaptureFile(path).checkpoints)
    assert b"canary" not in contents(out)


@pytest.mark.usefixtures("often")
def test_a_replay_from_each_checkpoint_has_the_pins_of_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out, config = tmp_path / "a.cap", tmp_path / "red.cap", config_of()
    pin, pinned = KeptStates.pin, list[int]()
    monkeypatch.setattr(kept_states, "LEAST_TOKENS", 4)
    monkeypatch.setattr(KeptStates, "pin", lambda *arguments: pinned.append(arguments[1]) or pin(*arguments))
    config = msgspec.structs.replace(config, kv_cache_memory_bytes=2 * (config.max_num_seqs + 24))

    def with_states(executor: Any) -> None:
        executor.info = msgspec.structs.replace(executor.info, state_bytes=1)

    capture(path, config, seed=5, num_steps=80, make=make_pinned, prepare=with_states)
    assert len(pinned) > 9
    assert replay_from_each(path) >= 2
    redact(CaptureFile(path), str(out))
    assert decisions(out) == decisions(path)
    assert replay_from_each(out) == len(CaptureFile(path).checkpoints)


@pytest.mark.usefixtures("often")
def test_a_file_that_begins_inside_has_the_pins_of_its_checkpoint(tmp_path: Path) -> None:
    config = config_of(capture_rotate_bytes=9000, num_blocks_override=60)
    capture(tmp_path / "a.cap", config, seed=6, num_steps=110, make=make_pinned)
    files = sorted(tmp_path.iterdir())
    assert len(files) > 2
    for path in files:
        out = tmp_path / f"{path.name}.red"
        redact(CaptureFile(path), str(out))
        assert decisions(out) == decisions(path)
        replay_from_each(out)
        assert b"canary" not in contents(out)


@pytest.mark.usefixtures("often")
def test_what_if_nothing_could_be_pinned(tmp_path: Path) -> None:
    path = tmp_path / "a.cap"
    capture(path, config_of(), seed=5, num_steps=80, make=make_pinned)
    file = CaptureFile(path)
    config = with_options(replay_config(file.header), max_pinned_share=0.0)
    run = rerun(file, config, recorded_executor(file))
    assert run.difference is not None  # other blocks are free
