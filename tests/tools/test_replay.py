"""`engine-core replay`: zero differences for what an engine really did; whatever else is located exactly."""

import json
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from core.capture_file import CaptureFile
from core.capture_records import TAGS, Gap, Header, Input, Step, decode_record, encode_record
from core.executor.fake import fake_tokens
from frontend.engine_process import EngineProcess
from ipc.config import EngineConfig
from ipc.messages import Abort, AddRequest, Goodbye, pack_numbers
from tests.captures import (
    CONFIG,
    NUM_REQUESTS,
    VOCAB,
    capture_in_process,
    change,
    frames_of,
    make_request,
    replaced,
    write_frames,
)
from tests.raw_client import RawClient
from tests.test_house import loaded_by
from tools.bench.tiny_model import VOCAB_SIZE, write_tiny_model
from tools.cli import main
from tools.replay.differences import unpack

LONG = 40_000  # tokens: more than any test waits for


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The workload of tests/captures.py on the fake executor, at both depths, and on a tiny real model."""
    folder = tmp_path_factory.mktemp("captures")
    write_tiny_model(folder / "model")
    configs = {
        "fake": CONFIG,
        "deep": msgspec.structs.replace(CONFIG, async_scheduling=True),
        "real": msgspec.structs.replace(
            CONFIG, executor="local", model=str(folder / "model"), dtype="float32", threads=1
        ),
    }
    for name, config in configs.items():
        capture_in_process(folder / name, config)
    return {"model": folder / "model", **{name: folder / name for name in configs}}


@pytest.fixture
def copy(captures: dict[str, Path], tmp_path: Path) -> Path:
    path = tmp_path / "copy.cap"
    path.write_bytes(captures["fake"].read_bytes())
    return path


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


# --- nothing differs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["resched", "full"])
@pytest.mark.parametrize("name", ["fake", "deep", "real"])
def test_zero_differences(captures: dict[str, Path], name: str, mode: str, capfd: pytest.CaptureFixture[str]) -> None:
    status, report = replay(capfd, captures[name], "--mode", mode)
    run = report["run"]
    assert (status, run["difference"]) == (0, None)
    assert (run["num_requests"], run["num_steps"]) == (NUM_REQUESTS, report["num_steps"])
    assert min(run["num_aborted"], run["num_preemptions"], run["num_cached_tokens"], run["num_tokens"]) > 0


def test_zero_differences_of_an_engine_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """50 requests of two clients, some aborted, one client leaving early."""
    rng, path = random.Random(3), tmp_path / "run.cap"
    requests = [make_request(number, rng) for number in range(NUM_REQUESTS)]
    config = msgspec.structs.replace(CONFIG, capture=str(path))
    with EngineProcess(config) as engine, RawClient(engine.address) as stays, RawClient(engine.address) as leaves:
        stays.send(*requests[:25])
        leaves.send(*requests[25:])
        stays.send(Abort(pack_numbers([3, 9, 20])))
        stays.statistics()
        leaves.send(Goodbye())
        stays.finish(*range(25))
    assert "every prompt and answer is captured to" in capfd.readouterr().err
    file = CaptureFile(path)
    assert file.close is not None, "ended in order by its owner"
    assert path.stat().st_mode & 0o777 == 0o600
    for mode in ("resched", "full"):
        status, report = replay(capfd, path, "--mode", mode)
        assert (status, report["run"]["difference"], report["run"]["num_requests"]) == (0, None, NUM_REQUESTS)
        assert report["has_close"]
    assert main(["replay", str(path)]) == 0
    assert "  0 differences\n" in capfd.readouterr().out


def test_resched_loads_no_torch() -> None:
    loaded = loaded_by("import tools.replay.__main__")
    assert loaded & {"torch", "transformers", "kernels"} == set()
    assert "tools.replay.__main__" not in loaded_by("import tools.cli")


# --- a difference is located -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fake", "deep", "real"])
def test_a_flipped_token_is_located(
    captures: dict[str, Path], tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """full: the step, the request, the position and both tokens, checked against the request's own stream."""
    path = tmp_path / "copy.cap"
    path.write_bytes(captures[name].read_bytes())
    place = find(path, Step, lambda step: len(step.tokens) >= 12 and min(unpack(step.tokens)) >= 0, skip=10)
    frame = frames_of(path)[place]
    step = decode_record(frame.tag, frame.payload)
    assert isinstance(step, Step)
    tokens = np.array(unpack(step.tokens), "<i4")
    right, tokens[1] = int(tokens[1]), tokens[1] ^ 1
    change(path, place, replaced(tokens=tokens.tobytes()))
    status, report = replay(capfd, path, "--mode", "full")
    found = report["run"]["difference"]
    assert status == 3
    assert (found["kind"], found["step"], found["offset"]) == ("token", step_index(path, place), frame.offset)
    assert (found["expected"], found["got"]) == (right ^ 1, right)
    request = next(
        message
        for turn in CaptureFile(captures[name]).turns()
        for client, message in turn.inbox
        if isinstance(message, AddRequest) and (client, message.number) == (found["client"], found["request"])
    )
    if name != "real":
        prompt = unpack(request.prompt_token_ids)
        seed = request.seed if request.params.temperature > 0 else 0
        assert fake_tokens(prompt, found["position"] + 1, VOCAB, seed)[-1] == right
    assert main(["replay", str(path), "--mode", "full"]) == 3
    text = capfd.readouterr().out
    where = f"step {found['step']} (byte {frame.offset}), client {found['client']} request {found['request']}, position"
    assert f"first difference: token, {where} {found['position']}: expected token {right ^ 1}, got {right}" in text


def flip_first(column: bytes) -> bytes:
    return bytes([column[0] ^ 1]) + column[1:]


@pytest.mark.parametrize("mode", ["resched", "full"])
@pytest.mark.parametrize(
    ("accept", "alter", "expected"),
    [
        (
            lambda step: bool(step.digest),
            lambda step: replaced(digest=flip_first(step.digest))(step),
            "the same requests and tokens; rows, block ids or the contents of added requests differ",
        ),
        (
            lambda step: len(step.rows) >= 8,
            lambda step: replaced(rows=step.rows[:-4], counts=step.counts[:-4] or b"\1\0\0\0")(step),
            "+ client ",
        ),
        (
            lambda step: len(step.counts) >= 8,
            lambda step: replaced(counts=flip_first(step.counts))(step),
            "~ client ",
        ),
        (lambda step: bool(step.removed_rows), lambda step: replaced(removed_rows=b"")(step), "1 row given up"),
        (
            lambda step: len(step.added) == 1 and step.added[0][3],
            lambda step: replaced(added=[(*step.added[0][:3], 0)])(step),
            "0 cached tokens, ",
        ),
        (
            lambda step: bool(step.digest),
            lambda step: replaced(digest=b"", rows=b"", counts=b"", removed_rows=b"", added=[])(step),
            "only the replay scheduled anything in this step",
        ),
        (
            lambda step: step.num_free_blocks > 0,
            lambda step: replaced(num_free_blocks=step.num_free_blocks - 1)(step),
            "num_free_blocks: ",
        ),
    ],
)
def test_a_flipped_decision_is_located(
    copy: Path,
    mode: str,
    accept: Callable[[Step], bool],
    alter: Callable[[Any], Step],
    expected: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    place = find(copy, Step, accept, skip=2)
    change(copy, place, alter)
    status, report = replay(capfd, copy, "--mode", mode)
    found = report["run"]["difference"]
    assert (status, found["kind"], found["step"]) == (3, "decision", step_index(copy, place))
    assert any(expected in line for line in found["details"]), found["details"]


def test_a_changed_input_is_a_decision_of_its_step(copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The seed is a part of the plan."""
    place = find(copy, Input, lambda record: isinstance(record.message, AddRequest), skip=1)

    def alter(record: Any) -> Input:
        return Input(record.client, msgspec.structs.replace(record.message, seed=record.message.seed ^ 1))

    change(copy, place, alter)
    status, report = replay(capfd, copy)
    assert (status, report["run"]["difference"]["kind"]) == (3, "decision")
    assert report["run"]["difference"]["step"] >= step_index(copy, place)


def test_the_captured_engines_failure_is_told(copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    place = find(copy, Step, lambda step: bool(step.tokens), skip=5)
    change(copy, place, replaced(error="MemoryError: no room", tokens=b"", result_step=-1))
    write_frames(copy, frames_of(copy)[: place + 1])
    assert main(["replay", str(copy)]) == 0
    out = capfd.readouterr().out
    assert f"the captured engine failed in step {step_index(copy, place)}: MemoryError: no room" in out
    status, report = replay(capfd, copy, "--mode", "full")
    assert (status, report["run"]["difference"]["kind"]) == (3, "error"), "the model did not fail again"


# --- damaged, incomplete, other model --------------------------------------------------------------------------------


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
        (data[: frames[0].end], "no whole step"),
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
    rng, good = random.Random(1), frames_of(copy)
    seen = set()
    for _ in range(50):
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


# --- engines that end otherwise --------------------------------------------------------------------------------------


def long_config(path: Path) -> EngineConfig:
    return EngineConfig(executor="fake", fake_vocab_size=VOCAB, max_model_len=2 * LONG, capture=str(path))


def test_an_engine_killed_in_mid_run_leaves_a_readable_capture(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.cap"
    engine = EngineProcess(long_config(path))
    with engine, RawClient(engine.address) as client:
        for number in range(4):
            client.add(number, [3, 4, number], LONG)
        end = time.monotonic() + 10
        while path.stat().st_size < 20_000 and time.monotonic() < end:
            client.receive_any()
        engine._live().process.send_signal(signal.SIGKILL)
        engine.wait(10)
    for mode in ("resched", "full"):
        status, report = replay(capfd, path, "--mode", mode)
        assert (status, report["has_close"], report["run"]["difference"]) == (0, False, None)
        assert report["num_steps"] > 100


def test_serving_goes_on_when_the_disk_is_full(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A limit on the size of the process's files stands for the disk."""
    path = tmp_path / "run.cap"
    with EngineProcess(long_config(path)) as engine, RawClient(engine.address) as client:
        resource.prlimit(engine.pid, resource.RLIMIT_FSIZE, (5000, 5000))
        for number in range(4):
            client.add(number, [3, 4, number], 2000)
            assert client.finish(number) == [fake_tokens([3, 4, number], 2000, VOCAB)]
    (warning,) = [line for line in capfd.readouterr().err.splitlines() if "stopped" in line]
    assert "run.cap stopped: File too large; it ends after" in warning
    status, report = replay(capfd, path)
    assert (status, report["has_close"], report["num_dropped_bytes"]) == (0, False, 0)


# --- live ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with EngineProcess(CONFIG) as engine:
        yield engine.address


@pytest.mark.parametrize("timing", [["--asap"], ["--speed", "2"], []])
def test_live(captures: dict[str, Path], server: str, timing: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    status, report = replay(capfd, captures["fake"], "--mode", "live", "--connect", server, *timing)
    assert (status, report["differences"], report["failures"]) == (0, [], [])
    assert report["num_requests"] == NUM_REQUESTS
    assert report["num_aborted"] > 0
    assert report["speed"] == {"--asap": None, "--speed": 2.0, "": 1.0}[(timing or [""])[0]]
    recorded, replayed = report["recorded"], report["replayed"]
    assert recorded["e2e_ms"]["count"] == replayed["e2e_ms"]["count"] > NUM_REQUESTS / 2
    assert recorded["ttft_ms"]["mean"] > 0 < replayed["tpot_ms"]["p50"]
    assert report["lateness_ms"]["count"] == NUM_REQUESTS
    span = 0.0 if timing == ["--asap"] else last_arrival(captures["fake"]) / report["speed"]
    assert report["seconds"] >= span - 0.001


def last_arrival(path: Path) -> float:
    """Seconds after the first step."""
    turns = list(CaptureFile(path).turns())
    times = [turn.step.now_ns for turn in turns if any(isinstance(one[1], AddRequest) for one in turn.inbox)]
    return (times[-1] - turns[0].step.now_ns) / 1e9


def test_live_finds_a_token(copy: Path, server: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Of a request that was neither aborted nor preempted, so that the scheduler does not see it."""
    place = find(copy, Step, lambda step: len(step.tokens) == 4 and unpack(step.tokens)[0] > 7)
    frame = frames_of(copy)[place]
    step = decode_record(frame.tag, frame.payload)
    assert isinstance(step, Step)
    right = unpack(step.tokens)[0]
    change(copy, place, replaced(tokens=np.array([right ^ 1], "<i4").tobytes()))
    status, report = replay(capfd, copy, "--mode", "live", "--connect", server, "--asap")
    (found,) = report["differences"]
    assert (status, found["expected"], found["got"]) == (3, right ^ 1, right)
    assert main(["replay", str(copy), "--mode", "live", "--connect", server, "--asap"]) == 3
    out = capfd.readouterr().out
    assert f"position {found['position']}: expected token {right ^ 1}, got {right}\n1 differences, 0 failures" in out
    assert "TTFT recorded" in out


def test_live_refuses_another_model(captures: dict[str, Path], server: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert error(capfd, captures["real"], "--mode", "live", "--connect", server)[0] == 5
