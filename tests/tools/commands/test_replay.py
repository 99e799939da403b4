"""`engine-core replay`: zero differences for what an engine really did; whatever else is located exactly."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from core.capture.file import CaptureFile
from core.capture.records import Input, Step, decode_config, decode_record
from core.execution.plan import NO_TOKEN
from frontend.engine.process import EngineProcess
from ipc.wire.messages import Abort, AddRequest, Goodbye
from tests.captures import (
    CONFIG,
    NUM_REQUESTS,
    VOCAB,
    capture_in_process,
    change,
    find,
    frames_of,
    make_request,
    replaced,
    replay,
    step_index,
    write_frames,
)
from tests.columns import pack_numbers
from tests.fake_tokens import fake_tokens
from tests.house.test_rules import loaded_by
from tests.raw_client import RawClient
from tools.cli import main
from tools.commands.replay.differences import unpack

# --- nothing differs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["resched", "full"])
@pytest.mark.parametrize(
    "name", ["fake", "deep", "several", "deep-several", "real", "deep-drafts", "real-drafts", "real-draft-model"]
)
def test_zero_differences(captures: dict[str, Path], name: str, mode: str, capfd: pytest.CaptureFixture[str]) -> None:
    status, report = replay(capfd, captures[name], "--mode", mode)
    run = report["run"]
    assert (status, run["difference"]) == (0, None)
    assert (run["num_requests"], run["num_steps"]) == (NUM_REQUESTS, report["num_steps"])
    assert min(run["num_aborted"], run["num_preemptions"], run["num_cached_tokens"], run["num_tokens"]) > 0


def test_plans_with_drafts_are_in_the_captures(captures: dict[str, Path]) -> None:
    """And of the real model's drafts some were right: a row had more than one token in a step."""
    for name, least in (("deep-drafts", 1), ("real-drafts", 2), ("real-draft-model", 4)):
        steps = [turn.step for turn in CaptureFile(captures[name]).turns()]
        counts = [np.frombuffer(step.token_counts, "<i4") for step in steps if step.token_counts]
        assert max(int(one.max()) for one in counts) >= least


def test_a_step_that_computes_a_part_of_a_prompt_alone_may_have_drafts(
    captures: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It has no token, as a step that was lost with its workers."""
    header, path = CaptureFile(captures["real-draft-model"]).header, tmp_path / "parts"
    capture_in_process(path, msgspec.structs.replace(decode_config(header), max_num_batched_tokens=8))
    steps = [turn.step for turn in CaptureFile(path).turns()]
    assert any(step.draft_counts and max(unpack(step.tokens)) == NO_TOKEN for step in steps)
    status, report = replay(capfd, path, "--mode", "full")
    assert (status, report["run"]["difference"]) == (0, None)


def test_zero_differences_of_an_engine_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Requests of two clients, some aborted, one client leaving early."""
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


@pytest.mark.checkout  # the modules that it names
def test_resched_loads_no_torch() -> None:
    loaded = loaded_by("import tools.commands.replay.__main__")
    assert loaded & {"torch", "transformers"} == set()
    assert "tools.commands.replay.__main__" not in loaded_by("import tools.cli")


# --- a difference is located -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fake", "deep", "several", "real"])
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
    right, tokens[0] = int(tokens[0]), tokens[0] ^ 1  # of the first in the order, which is never preempted
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


def test_a_flipped_token_behind_its_rows_first_is_located(
    captures: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "copy.cap"
    path.write_bytes(captures["several"].read_bytes())
    place = find(
        path, Step, lambda step: unpack(step.token_counts)[1:2] > [2] and min(unpack(step.tokens)) >= 0, skip=4
    )
    frame = frames_of(path)[place]
    step = decode_record(frame.tag, frame.payload)
    assert isinstance(step, Step)
    tokens, at = np.array(unpack(step.tokens), "<i4"), unpack(step.token_counts)[0] + 2
    status, report = replay(capfd, path, "--mode", "full")
    assert (status, report["run"]["difference"]) == (0, None)
    right, tokens[at] = int(tokens[at]), tokens[at] ^ 1
    change(path, place, replaced(tokens=tokens.tobytes()))
    status, report = replay(capfd, path, "--mode", "full")
    found = report["run"]["difference"]
    assert (status, found["step"], found["expected"], found["got"]) == (3, step_index(path, place), right ^ 1, right)
    asked = (m for turn in CaptureFile(path).turns() for c, m in turn.inbox if c == found["client"])
    request = next(m for m in asked if isinstance(m, AddRequest) and m.number == found["request"])
    seed = request.seed if request.params.temperature > 0 else 0
    assert fake_tokens(unpack(request.prompt_token_ids), found["position"] + 1, VOCAB, seed)[-1] == right


@pytest.mark.parametrize(
    "alter",
    [lambda counts: counts[:-4], lambda counts: b"", lambda counts: b"\xff\xff\xff\xff" + counts[4:]],
    ids=["few", "none", "negative"],
)
def test_token_counts_that_do_not_fit_are_an_error_of_the_replay(
    captures: dict[str, Path], tmp_path: Path, alter: Callable[[bytes], bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "copy.cap"
    path.write_bytes(captures["several"].read_bytes())
    place = find(path, Step, lambda step: len(step.tokens) > len(step.token_counts) > 8)
    step = decode_record(frames_of(path)[place].tag, frames_of(path)[place].payload)
    assert isinstance(step, Step)
    change(path, place, replaced(token_counts=alter(step.token_counts)))
    status, report = replay(capfd, path)
    assert (status, report["run"]["difference"]["kind"]) == (3, "error")
    text = f"has no tokens for the {len(step.token_counts) // 4} rows"
    assert text in " ".join(report["run"]["difference"]["details"])


def test_a_step_of_a_capture_without_token_counts_is_read(captures: dict[str, Path]) -> None:
    """Format 1.0 had no such field: its steps have one token a row."""
    frame = frames_of(captures["fake"])[find(captures["fake"], Step, lambda step: bool(step.tokens))]
    fields = msgspec.msgpack.decode(frame.payload)
    num_old = Step.__struct_fields__.index("token_counts")
    assert [one for one in fields[num_old:] if one] == [fields[Step.__struct_fields__.index("times")]]
    step, whole = decode_record(frame.tag, msgspec.msgpack.encode(fields[:num_old])), decode_record(*frame[2:4])
    assert isinstance(step, Step)
    assert isinstance(whole, Step)
    assert len(whole.times) == 12  # format 1.3
    assert step == msgspec.structs.replace(whole, times=b"")


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
        (lambda step: bool(step.removed_rows), lambda step: replaced(removed_rows=b"")(step), "1 row preempted"),
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
