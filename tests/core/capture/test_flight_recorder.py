"""The flight recorder: what its ring has at any moment is a capture that replays, redacted or whole."""

import contextlib
import json
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from core.capture import flight_file, flight_recorder
from core.capture.engine import CapturedEngine, make_header
from core.capture.file import CaptureFile
from core.capture.flight_file import write_flight
from core.capture.flight_recorder import FlightRecorder
from core.capture.records import Input, Step
from core.capture.write_flight import main as write_main
from core.executors.by_name import load_executor
from core.inputs import EngineInput
from ipc.errors import CaptureFileError, ConfigError
from ipc.options.config import EngineConfig
from ipc.options.speculation import SpeculativeConfig
from ipc.records.flight_ring import FlightFile, read_ring
from ipc.wire.messages import AddRequest
from tests.captures import CONFIG, make_request
from tests.core.capture.test_checkpoints import make_any, other_inputs
from tools.commands.replay.__main__ import main as replay_main

WHOLE = msgspec.structs.replace(CONFIG, flight_recorder_contents=True)


class Recorded:
    """An engine with a flight recorder, driven by random clients."""

    def __init__(self, config: EngineConfig, ring_bytes: int, *, seconds: int = 10**6, seed: int = 1) -> None:
        self.ring = FlightFile(ring_bytes)
        executor = load_executor(config)
        executor.initialize_cache(config)
        header = make_header(config, executor.info, "test", 0)
        self.recorder = FlightRecorder(self.ring.fd, header, seconds)
        self.engine = CapturedEngine(config, executor, self.recorder)
        self.make = make_request
        self.num_steps = self.number = 0
        self.num_checkpoints = 0
        self._rng = random.Random(seed)

    def run(self, num_steps: int, *, waits: bool = True) -> None:
        """Run steps; with `waits`, each checkpoint is there before the next step."""
        for _ in range(num_steps):
            inbox: list[tuple[int, EngineInput]] = other_inputs(self._rng) if self.make is make_any else []
            for _ in range(self._rng.choice([0, 0, 1, 2])):
                inbox.append((self.number % 3, self.make(self.number, self._rng)))
                self.number += 1
            self.engine.step(inbox, 10**12 + self.num_steps * 1_000_000_000)
            self.num_steps += 1
            while waits and self.recorder._kept is not None and self.recorder._ready < 0:
                time.sleep(0.001)

    def write(self, path: Path) -> CaptureFile:
        """Write the file, and replay it."""
        written = write_flight(read_ring(self.ring.fd), 1, str(path))
        assert written is not None
        assert replay_main([str(path)]) == 0
        file = CaptureFile(path)
        assert file.num_steps == written.num_steps
        return file


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    for recorder in _RECORDERS:
        recorder.close()
    for thread in threading.enumerate():
        if thread.name == "flight recorder":
            thread.join()
    _RECORDERS.clear()


_RECORDERS: list[FlightRecorder] = []


def start(config: EngineConfig = WHOLE, ring_bytes: int = 1 << 17, *, seconds: int = 10**6, seed: int = 1) -> Recorded:
    recorded = Recorded(config, ring_bytes, seconds=seconds, seed=seed)
    _RECORDERS.append(recorded.recorder)
    return recorded


@pytest.mark.usefixtures("capsys")
def test_the_ring_replays_after_any_number_of_steps(tmp_path: Path) -> None:
    one = start()
    previous = 0
    for index in range(4):
        one.run(90)
        file = one.write(tmp_path / f"{index}.cap")
        assert file.first_step + file.num_steps == one.num_steps, "the last record is that of the last step"
        assert file.first_step >= previous
        previous = file.first_step
    assert previous > 0, "the beginning was never given up: the ring is too large for this test"
    assert file.checkpoints
    assert file.begins_inside


def test_the_ring_gets_its_pages_before_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14):
        pytest.skip("a kernel before Linux 5.14 makes each page when it is first written to")
    monkeypatch.setattr(flight_recorder, "_SETTLE_S", 0.0)
    one = start(ring_bytes=1 << 20)
    end = time.monotonic() + 10.0
    while os.fstat(one.ring.fd).st_blocks * 512 < 1 << 20:
        assert time.monotonic() < end, "pages are missing"
        one.run(1)
    one.run(50)
    assert one.write(tmp_path / "a.cap").num_steps == one.num_steps, "nothing that was written is gone"


@pytest.mark.usefixtures("capsys")
def test_it_replays_while_a_checkpoint_is_being_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()
    encode = flight_recorder.encode_record
    main_thread = threading.current_thread()

    def encode_late(record: Input | Step) -> bytes:
        if threading.current_thread() is not main_thread:
            may_go_on.wait()
        return encode(record)

    monkeypatch.setattr(flight_recorder, "encode_record", encode_late)
    one = start(seconds=40)
    one.run(40, waits=False)
    assert one.recorder._kept is None
    one.run(20, waits=False)
    assert one.recorder._kept
    assert one.write(tmp_path / "during.cap").num_steps == 60
    may_go_on.set()
    while one.recorder._ready < 0:
        time.sleep(0.001)
    one.run(5)
    file = one.write(tmp_path / "after.cap")
    assert (file.num_steps, len(file.checkpoints)) == (65, 1)
    (old, new) = read_ring(one.ring.fd)
    assert new.generation == 2
    one.run(45)
    assert one.write(tmp_path / "later.cap").begins_inside
    assert len(old.data) > len(new.data)


@pytest.mark.usefixtures("capsys")
def test_what_does_not_fit_is_left_out_and_the_rest_still_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(flight_recorder.log, "say", said.append)
    monkeypatch.setattr(FlightRecorder, "_write_head", _no_room(FlightRecorder._write_head))
    one = start(ring_bytes=1 << 16)
    one.run(400)
    file = one.write(tmp_path / "a.cap")
    assert file.num_steps < one.num_steps
    assert file.first_step == 0
    assert len(said) == 1
    assert "raise flight_recorder_bytes" in said[0]


def _no_room(write):  # type: ignore[no-untyped-def]
    return lambda self, half, sequence, checkpoint: 0 if checkpoint else write(self, half, sequence, checkpoint)


@pytest.mark.usefixtures("capsys")
def test_the_file_is_redacted_and_its_last_inputs_are_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = start(msgspec.structs.replace(CONFIG, max_num_seqs=4))
    one.run(80)
    secret = make_request(10_000, random.Random(99))
    one.recorder.add(Input(7, secret, 5))  # the engine dies in the step that has it
    file = one.write(tmp_path / "a.cap")
    assert file.header.is_redacted
    (last,) = file.last_inputs()
    assert isinstance(last.message, AddRequest)
    assert (last.client, last.message.number) == (7, 10_000)
    assert len(last.message.prompt_token_ids) == len(secret.prompt_token_ids)
    assert last.message.prompt_token_ids != secret.prompt_token_ids
    assert secret.prompt_token_ids[:16] not in (tmp_path / "a.cap").read_bytes()
    capsys.readouterr()
    replay_main([str(tmp_path / "a.cap")])
    assert "did not finish: client 7 request 10000" in capsys.readouterr().out
    replay_main([str(tmp_path / "a.cap"), "--json"])
    assert json.loads(capsys.readouterr().out)["num_last_inputs"] == 1


@pytest.mark.usefixtures("capsys")
def test_the_part_that_can_be_redacted_is_written(tmp_path: Path) -> None:
    """A beam search at the older half's checkpoint cannot be renamed; at the newer one's there is none."""
    one = start(CONFIG, seconds=10)
    one.make = make_any
    for _ in range(16):
        one.run(8)
        with contextlib.suppress(CaptureFileError):  # beam searches run at both checkpoints
            one.write(tmp_path / f"{one.num_steps}.cap")
    written = sorted(tmp_path.glob("*.cap"))
    assert len(written) > 4
    assert not list(tmp_path.glob("*.part"))


def test_guessed_tokens_cannot_be_redacted(tmp_path: Path) -> None:
    config = msgspec.structs.replace(
        CONFIG, speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    )
    one = start(config)
    one.run(10)
    with pytest.raises(CaptureFileError, match="guessed tokens ahead"):
        one.write(tmp_path / "a.cap")
    assert not list(tmp_path.iterdir())


def test_files_get_names_and_old_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_file, "KEPT_FILES", 2)
    folder = tmp_path / "a" / "b"
    one = start(msgspec.structs.replace(WHOLE, flight_recorder_folder=str(folder)))
    assert write_main([str(one.ring.fd), "77", "text"]) == 0
    assert not folder.exists(), "there was no step"
    one.run(3)
    for _ in range(4):
        assert write_flight(read_ring(one.ring.fd), 77) is not None
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 2
    assert all(name.endswith("-77.cap") for name in names)
    assert (folder.stat().st_mode & 0o777, (folder / names[0]).stat().st_mode & 0o777) == (0o700, 0o600)
    (tmp_path / "file").touch()
    nowhere = start(msgspec.structs.replace(WHOLE, flight_recorder_folder=str(tmp_path / "file" / "x")))
    nowhere.run(3)
    with pytest.raises(ConfigError, match="cannot be created"):
        write_flight(read_ring(nowhere.ring.fd), 77)


def test_options_that_are_none_are_refused() -> None:
    for options in ({"flight_recorder_bytes": 1000}, {"flight_recorder_seconds": 0}, {"flight_recorder_folder": ""}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            EngineConfig(**options)


@pytest.mark.soak
@pytest.mark.usefixtures("capsys")
@pytest.mark.parametrize("seed", range(int(os.environ.get("SOAK_FLIGHTS", "30"))))
def test_random_engines_replay_at_random_moments(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    one = start(msgspec.structs.replace(WHOLE, max_num_seqs=rng.choice([2, 8])), seconds=rng.choice([20, 10**6]))
    one.make = make_any
    for index in range(10):
        one.run(rng.randrange(1, 60), waits=rng.random() < 0.5)
        one.write(tmp_path / f"{index}.cap")
