"""The capture: what is written, what is read back, and that it never holds the engine up."""

import errno
import os
import stat
import threading
from pathlib import Path

import msgspec
import pytest

from core.capture import writer as capture_writer
from core.capture.engine import CapturedEngine, capture_path, start_capture
from core.capture.file import CaptureFile
from core.capture.records import (
    FORMAT_MINOR,
    TAGS,
    Close,
    Gap,
    Header,
    Input,
    Step,
    decode_config,
    decode_record,
    encode_record,
)
from core.capture.writer import CaptureWriter, open_capture
from core.execution.executor import ModelInfo
from core.execution.plan import SchedulerOutput
from core.executors.fake import FakeExecutor
from core.log import flush
from ipc.errors import CaptureFileError, ConfigError
from ipc.options.config import EngineConfig
from ipc.records.log_frames import pack_frame
from ipc.wire.messages import Abort, AddRequest, Goodbye
from tests.captures import CONFIG, NUM_REQUESTS, capture_in_process, change, frames_of, replaced, write_frames
from tests.raw_client import request

MODEL = ModelInfo("fake", "f", "float32", 1000, 200, (2,), "L2")
STEP = Step(1, 2, b"digest", b"", b"", b"", [], 0, 0, 9, -1, b"")


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("capture") / "run.cap"
    engine = capture_in_process(path)
    stats = engine.engine.scheduler.stats
    assert min(stats.num_preemptions, stats.prefix_cache_hits) > 0
    return path


@pytest.fixture
def copy(captured: Path, tmp_path: Path) -> Path:
    path = tmp_path / "copy.cap"
    path.write_bytes(captured.read_bytes())
    return path


def writer(path: Path) -> CaptureWriter:
    return start_capture(str(path), CONFIG, MODEL, "0", 0)


def refused(path: Path) -> str:
    with pytest.raises(CaptureFileError) as caught:
        list(CaptureFile(path).turns())
    assert str(path) in str(caught.value)
    return str(caught.value)


# --- what is written ---------------------------------------------------------------------------------------------


def test_a_run_is_written_and_read_back(captured: Path) -> None:
    file = CaptureFile(captured)
    turns = list(file.turns())
    messages = [message for turn in turns for _, message in turn.inbox]
    assert sum(isinstance(message, AddRequest) for message in messages) == NUM_REQUESTS
    assert {type(message) for message in messages} >= {Abort, Goodbye}
    assert file.close == Close(len(messages), len(turns), 0)
    assert (file.num_lost, file.num_unknown, file.num_dropped_bytes) == (0, 0, 0)
    assert [turn.step_index for turn in turns] == list(range(file.num_steps))
    assert decode_config(file.header) == CONFIG


def test_every_option_is_in_the_header_whatever_its_default(captured: Path) -> None:
    assert all(name.encode() in bytes(CaptureFile(captured).header.config) for name in EngineConfig.__struct_fields__)


def test_a_row_that_stays_is_not_written_again(captured: Path) -> None:
    steps = [turn.step for turn in CaptureFile(captured).turns() if turn.step.digest]
    assert any(not step.rows and not step.counts for step in steps)


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    writer(tmp_path / "a.cap").close()
    assert stat.S_IMODE((tmp_path / "a.cap").stat().st_mode) == 0o600


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("old", "link"):
        with pytest.raises(ConfigError, match="already exists and is never overwritten"):
            writer(tmp_path / name)
    with pytest.raises(ConfigError, match="does not exist"):
        writer(tmp_path / "none" / "a.cap")
    assert (tmp_path / "old").read_text() == "old"


def test_an_engine_that_is_started_again_takes_another_file() -> None:
    config = EngineConfig(capture="a.cap")
    assert [capture_path(config, epoch) for epoch in range(3)] == ["a.cap", "a.cap.1", "a.cap.2"]
    assert capture_path(EngineConfig(), 2) is None


def test_a_step_that_fails_is_written_as_far_as_it_came(tmp_path: Path) -> None:
    class Failing(FakeExecutor):
        def execute(self, plan: SchedulerOutput) -> None:  # type: ignore[override]
            raise MemoryError("no room")

    executor = Failing(CONFIG)
    log = writer(tmp_path / "a.cap")
    engine = CapturedEngine(CONFIG, executor, log)
    with pytest.raises(MemoryError):
        engine.step([(1, request(0, [3, 4, 5]))], 5)
    log.close()
    (turn,) = CaptureFile(tmp_path / "a.cap").turns()
    assert turn.step.error == "MemoryError: no room"
    assert turn.step.digest
    assert turn.step.added == [(0, 1, 0, 0)]


# --- a file that is too slow, or full ----------------------------------------------------------------------------


def test_what_finds_no_room_in_the_queue_is_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_writer, "MAX_QUEUED_BYTES", 1000)
    hold, write = threading.Event(), os.write
    log = writer(tmp_path / "a.cap")
    monkeypatch.setattr(os, "write", lambda fd, data: hold.wait(10) and write(fd, data))
    for _ in range(100):
        log.add(STEP)
    hold.set()
    log.close()
    file = CaptureFile(tmp_path / "a.cap")
    assert 0 < file.num_steps < 100
    assert file.num_lost == 100 - file.num_steps
    assert file.close == Close(0, file.num_steps, file.num_lost)


def test_records_go_on_after_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = writer(tmp_path / "a.cap")
    log.add(STEP)
    with monkeypatch.context() as patch:
        patch.setattr(capture_writer, "MAX_QUEUED_BYTES", 1)
        log.add(STEP)
        log.add(STEP)
    log.add(STEP)
    log.close()
    records = [decode_record(frame.tag, frame.payload) for frame in frames_of(tmp_path / "a.cap")[1:]]
    assert records == [STEP, Gap(2, 2), STEP, Close(0, 2, 2)]
    assert [frame.sequence for frame in frames_of(tmp_path / "a.cap")] == [0, 1, 4, 5, 6]
    assert CaptureFile(tmp_path / "a.cap").num_lost == 2


def test_a_full_disk_stops_the_capture_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The disk takes a part of a batch: one whole record and a bit of the next."""
    flush(10.0)
    capfd.readouterr()  # lines of earlier tests
    log = writer(tmp_path / "a.cap")
    full, write = os.open("/dev/full", os.O_WRONLY), os.write
    room = [70]

    def write_half(fd: int, data: bytes) -> int:
        if fd == 2:  # the log's line
            return write(fd, data)
        return write(fd, data[: room.pop()]) if room else write(full, b"x")

    monkeypatch.setattr(os, "write", write_half)
    log.add(STEP)
    log.add(STEP)
    log.close()
    flush(10.0)
    for _ in range(1000):
        log.add(STEP)
    monkeypatch.undo()
    os.close(full)
    (line,) = capfd.readouterr().err.splitlines()
    assert "a.cap stopped: No space left on device; it ends after" in line
    file = CaptureFile(tmp_path / "a.cap")
    assert (file.num_steps, file.close, file.num_dropped_bytes) == (1, None, 0)


def test_a_disk_that_is_full_from_the_start_is_said_at_the_start() -> None:
    header = Header("", 1, 0, "", encode_record(STEP), MODEL, 0, 0, 0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"capture='/dev/full': No space left on device"):
        CaptureWriter("/dev/full", os.open("/dev/full", os.O_WRONLY), header)
    assert os.path.exists("/dev/full")


def test_a_refused_capture_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = Header("", 1, 0, "", encode_record(STEP), MODEL, 0, 0, 0)  # type: ignore[arg-type]
    fd = open_capture(str(tmp_path / "a.cap"))

    def refuse(fd: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(ConfigError, match="No space left on device"):
        CaptureWriter(str(tmp_path / "a.cap"), fd, header)
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())


def test_closing_twice_and_adding_afterwards_change_nothing(tmp_path: Path) -> None:
    log = writer(tmp_path / "a.cap")
    log.close()
    size = (tmp_path / "a.cap").stat().st_size
    log.add(STEP)
    log.close()
    assert (tmp_path / "a.cap").stat().st_size == size


# --- a file that is torn, damaged or no capture --------------------------------------------------------------------


def test_a_tail_torn_at_any_byte_of_the_last_three_frames(copy: Path) -> None:
    data, frames = copy.read_bytes(), frames_of(copy)
    for end in range(frames[-3].offset, len(data)):
        copy.write_bytes(data[:end])
        file = CaptureFile(copy)
        whole = [frame for frame in frames if frame.end <= end]
        assert file.num_steps == sum(frame.tag == TAGS[Step] for frame in whole)
        assert file.num_dropped_bytes == end - whole[-1].end
        assert file.close is None


@pytest.mark.parametrize("field", range(18))
def test_a_flipped_bit_is_damage(copy: Path, field: int) -> None:
    """field: byte of the frame's head; the last is the payload's first."""
    frame = frames_of(copy)[20]
    data = bytearray(copy.read_bytes())
    data[frame.offset + field] ^= 4
    copy.write_bytes(data)
    assert f"damaged at byte {frame.offset}" in refused(copy)


def test_records_missing_doubled_or_after_the_end(copy: Path) -> None:
    frames = frames_of(copy)
    for bad in (
        frames[:10] + frames[11:],
        [*frames[:10], frames[9], *frames[10:]],
        [*frames[:10], frames[11], frames[10], *frames[12:]],
    ):
        write_frames(copy, bad)
        assert "records are missing" in refused(copy) or "damaged" in refused(copy)
    after = [*frames, frames[5]._replace(sequence=len(frames))]
    write_frames(copy, after)
    assert "records after the last one" in refused(copy)
    write_frames(copy, [*frames[:10], frames[0]._replace(sequence=10)])
    assert "a second header" in refused(copy)


def test_a_gap_must_account_for_what_is_missing(copy: Path) -> None:
    frames = frames_of(copy)
    for gap, is_right in ((Gap(10, 2), True), (Gap(10, 1), False), (Gap(9, 3), False), (Gap(10, 0), False)):
        head = frames[10]._replace(sequence=12, tag=TAGS[Gap], payload=encode_record(gap))
        write_frames(copy, [*frames[:10], head])
        if is_right:
            assert CaptureFile(copy).num_lost == 2
        else:
            assert "records are missing" in refused(copy)


def test_totals_must_agree(copy: Path) -> None:
    change(copy, -1, replaced(num_steps=7))
    assert "the totals are" in refused(copy)


def test_a_sound_frame_with_foreign_content(copy: Path) -> None:
    frames = frames_of(copy)
    place = next(place for place, frame in enumerate(frames) if frame.tag == TAGS[Input])
    frames[place] = frames[place]._replace(payload=b"\xc1")
    write_frames(copy, frames)
    assert "its content is invalid" in refused(copy)


def test_records_of_a_later_minor_are_counted(copy: Path) -> None:
    frames = frames_of(copy)[:10]
    write_frames(copy, [*frames, frames[1]._replace(sequence=10, tag=200)])
    assert CaptureFile(copy).num_unknown == 1


def test_an_input_of_a_later_minor_names_the_format(copy: Path) -> None:
    """It is no damage: a later version has messages that this one does not know."""
    frames = frames_of(copy)
    place = next(place for place, frame in enumerate(frames) if frame.tag == TAGS[Input])
    frames[place] = frames[place]._replace(payload=msgspec.msgpack.encode([0, [199, "new"], 0]))
    write_frames(copy, frames)
    assert "its content is invalid" in refused(copy)
    change(copy, 0, replaced(minor=FORMAT_MINOR + 1))
    assert f"a capture of format 1.{FORMAT_MINOR + 1}, but this version supports 1.{FORMAT_MINOR}" in refused(copy)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "the file is empty"),
        (b"PK\3\4" * 100, "does not start with a complete record"),
        (pack_frame(0, 1, b"junk"), "not a capture of engine-core"),
        (pack_frame(0, 1, b"\x93\xa3abc\1\0"), "does not start with a header"),
        (pack_frame(0, 3, encode_record(STEP)), "not a capture of engine-core"),
        (pack_frame(0, 1, b"\x93\xb3engine-core capture\2\0"), "a capture of format 2.0; this version reads format 1"),
    ],
)
def test_no_capture(tmp_path: Path, data: bytes, text: str) -> None:
    path = tmp_path / "bad.cap"
    path.write_bytes(data)
    assert text in refused(path)


def test_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "none", tmp_path / "fifo"):
        refused(path)
