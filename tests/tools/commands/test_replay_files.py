"""`engine-core replay` on files that are torn, damaged or another model's: one line and a status, no traceback."""

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from core.capture.file import CaptureFile
from core.capture.records import TAGS, Gap, Header, Input, encode_record
from ipc.wire.messages import AddRequest
from tests.captures import (
    VOCAB,
    change,
    error,
    find,
    frames_of,
    replaced,
    replay,
    write_frames,
)
from tools.cli import main
from tools.lab.bench.tiny_model import VOCAB_SIZE, write_tiny_model


def test_a_torn_tail_is_replayed_as_far_as_it_goes(copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data, frames = copy.read_bytes(), frames_of(copy)
    copy.write_bytes(data[: frames[-3].end - 1])
    status, report = replay(capfd, copy)
    assert (status, report["has_close"], report["run"]["difference"]) == (0, False, None)
    assert report["num_dropped_bytes"] == frames[-3].end - 1 - frames[-3].offset


def test_what_cannot_be_replayed_is_one_line_and_status_4(
    copy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data, frames = copy.read_bytes(), frames_of(copy)
    damaged = bytearray(data)
    damaged[frames[20].end - 1] ^= 1
    for content, text in (
        (b"", "empty"),
        (data[: frames[0].end], "no complete step"),
        (data[: frames[0].end - 1], "not a capture"),
        (bytes(damaged), f"damaged at byte {frames[20].offset}"),
    ):
        copy.write_bytes(content)
        for mode in ("resched", "full"):
            status, line = error(capfd, copy, "--mode", mode)
            assert status == 4
            assert line.startswith("engine-core: error: ")
            assert text in line
    assert error(capfd, tmp_path / "none")[0] == 4
    gap = frames[10]._replace(sequence=12, tag=TAGS[Gap], payload=encode_record(Gap(10, 2)))
    write_frames(copy, [*frames[:10], gap])
    status, line = error(capfd, copy)
    assert (status, "2 records are missing" in line) == (4, True)


def test_a_request_no_engine_took_in_is_damage(copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    place = find(copy, Input, lambda record: isinstance(record.message, AddRequest), skip=3)

    def alter(record: Any) -> Input:
        prompt = np.array([VOCAB], "<i4").tobytes()
        return Input(record.client, msgspec.structs.replace(record.message, prompt_token_ids=prompt))

    change(copy, place, alter)
    status, line = error(capfd, copy)
    assert (status, "token 1000 at index 0" in line) == (4, True)


def test_changed_bytes_under_right_checksums_never_end_in_a_traceback(
    copy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rng, good = random.Random(4), frames_of(copy)
    seen = set()
    for _ in range(25):
        frames = list(good)
        place = rng.randrange(1, len(frames))
        payload = bytearray(frames[place].payload)
        for _ in range(rng.choice((1, 1, 5))):
            payload[rng.randrange(len(payload))] = rng.randrange(256)
        frames[place] = frames[place]._replace(payload=bytes(payload[: rng.choice((len(payload), 5))]))
        write_frames(copy, frames)
        status = main(["replay", str(copy)])
        seen.add(status)
        assert len(capfd.readouterr().err.splitlines()) == (status in (4, 5))
    assert seen <= {0, 3, 4, 5}
    assert {3, 4} <= seen


def test_another_model_or_other_options_are_status_5(
    captures: dict[str, Path], copy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    header = CaptureFile(copy).header
    change(copy, 0, replaced(model=msgspec.structs.replace(header.model, fingerprint="other")))
    status, line = error(capfd, copy, "--mode", "full")
    assert (status, "with fingerprint other" in line) == (5, True)
    assert replay(capfd, copy)[0] == 0, "the scheduler does not ask for the model"

    other = tmp_path / "other"
    write_tiny_model(other)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-2] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    assert error(capfd, captures["real"], "--mode", "full", "--model", str(other))[0] == 5
    assert error(capfd, captures["real"], "--mode", "full", "--model", str(tmp_path / "none"))[0] == 5

    options = msgspec.msgpack.decode(header.config)
    change(copy, 0, replaced(config=msgspec.Raw(msgspec.msgpack.encode({**options, "later_option": 1}))))
    status, line = error(capfd, copy)
    assert (status, "later_option" in line) == (5, True)


def test_the_model_may_have_moved(captures: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "copy.cap"
    path.write_bytes(captures["real"].read_bytes())
    options = msgspec.msgpack.decode(CaptureFile(path).header.config)
    gone = msgspec.Raw(msgspec.msgpack.encode({**options, "model": str(tmp_path / "gone")}))

    def alter(record: Any) -> Header:
        moved: Header = msgspec.structs.replace(record, config=gone)
        return moved

    change(path, 0, alter)
    assert error(capfd, path, "--mode", "full")[0] == 5
    assert replay(capfd, path, "--mode", "full", "--model", str(captures["model"]))[0] == 0
    assert VOCAB_SIZE > VOCAB


@pytest.mark.parametrize(
    "options",
    [
        ["--mode", "live"],
        ["--asap"],
        ["--mode", "full", "--connect", "ipc:///a"],
        ["--model", "m"],
        ["--mode", "live", "--connect", "ipc:///a", "--speed", "0"],
        ["--mode", "live", "--connect", "ipc:///a", "--speed", "nan"],
        ["--mode", "live", "--connect", "ipc:///a", "--speed", "2", "--asap"],
        ["--mode", "nonsense"],
    ],
)
def test_options_that_do_not_go_together(options: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["replay", "x.cap", *options])
    assert caught.value.code == 2
    assert "error: " in capfd.readouterr().err
