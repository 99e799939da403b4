"""`engine-core replay FILE --perfetto OUT`: the trace tells the capture's steps and requests, whole and in order."""

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from core.capture.engine import start_capture
from core.capture.file import CaptureFile
from core.executors.by_name import load_executor
from tests.captures import CONFIG, capture_in_process
from tests.placed import PREFIX
from tools.cli import main
from tools.commands.replay.live import End, read_traces


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with aborts, preemptions, prefix hits and a client that leaves."""
    path = tmp_path_factory.mktemp("perfetto") / "a.cap"
    engine = capture_in_process(path, CONFIG)
    assert engine.engine.scheduler.stats.num_preemptions > 0
    return path


@pytest.fixture(scope="module")
def events(capture: Path) -> list[dict[str, Any]]:
    out = capture.with_name("a.json.gz")
    assert main(["replay", str(capture), "--perfetto", str(out)]) == 0
    found: list[dict[str, Any]] = json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]
    return found


def test_every_request_has_spans_from_its_arrival_to_its_end(capture: Path, events: list[dict[str, Any]]) -> None:
    """The outside oracle: the traces that a live replay is made from."""
    spans, begun = defaultdict(list), dict[str, dict[str, Any]]()
    for event in events:
        if event["ph"] == "b":
            assert event["id"] not in begun, "spans of a request must not overlap"
            begun[event["id"]] = event
        elif event["ph"] == "e":
            begin = begun.pop(event["id"])
            assert begin["name"] == event["name"]
            spans[event["id"]].append((begin["name"], begin["ts"], event["ts"], begin["args"].get("end")))
    assert not begun
    traces = read_traces(CaptureFile(capture))
    assert spans.keys() == {f"{one.client}/{one.message.number}.0" for one in traces}
    for one in traces:
        mine = spans[f"{one.client}/{one.message.number}.0"]
        assert mine[0][0] == "queued"
        assert [later[1] for later in mine[1:]] == [earlier[2] for earlier in mine[:-1]]
        assert mine[0][1] == pytest.approx(one.arrival * 1e6, abs=0.01)
        assert one.end_time is not None
        assert mine[-1][2] == pytest.approx(one.end_time * 1e6, abs=0.01)
        assert (
            mine[-1][3]
            in {
                End.FINISHED: ("stop", "length"),
                End.ABORTED: ("abort", "left"),
                End.FAILED: ("failed",),
                End.OPEN: ("open",),
            }[one.end]
        )
        if one.first_token is not None:
            decode = next(span for span in mine if span[0] == "decode")
            assert decode[1] == pytest.approx(one.first_token * 1e6, abs=0.01)
    names = {name for mine in spans.values() for name, *_ in mine}
    assert names == {"queued", "prompt", "decode", "preempted"}


def test_steps_have_their_parts_and_counters(capture: Path, events: list[dict[str, Any]]) -> None:
    steps = [event for event in events if event["ph"] == "X" and event["name"] == "step"]
    turns = [turn for turn in CaptureFile(capture).turns() if turn.step.digest]
    assert [event["args"]["step"] for event in steps] == [turn.step_index for turn in turns]
    parts = [event for event in events if event["ph"] == "X" and event["name"] != "step"]
    assert [part["name"] for part in parts] == ["schedule", "model", "update"] * len(steps)
    for index, (event, turn) in enumerate(zip(steps, turns, strict=True)):
        mine = parts[3 * index : 3 * index + 3]
        assert mine[0]["ts"] == event["ts"]
        assert sum(part["dur"] for part in mine) <= event["dur"]
        assert event["args"]["free blocks"] == turn.step.num_free_blocks
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"running", "waiting", "free blocks", "tokens in the step"}


def test_a_file_that_is_there_is_not_overwritten(capture: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = capture.with_name("there.json")
    out.write_text("mine")
    assert main(["replay", str(capture), "--perfetto", str(out)]) == 1
    assert "File exists" in capfd.readouterr().err
    assert out.read_text() == "mine"
    with pytest.raises(SystemExit):
        main(["replay", str(capture), "--perfetto", "x", "--what-if", "max_num_seqs=2"])


def test_a_long_trace_is_cut_with_a_word(
    capture: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for module in ("perfetto", "__main__"):
        monkeypatch.setattr(f"{PREFIX}tools.commands.replay.{module}.MAX_EVENTS", 100)
    out = capture.with_name("cut.json")
    assert main(["replay", str(capture), "--perfetto", str(out)]) == 0
    assert "of which the file has the first 100" in capfd.readouterr().out
    assert len(json.loads(out.read_text())["traceEvents"]) == 100


def test_an_engine_without_a_step_has_a_trace_without_events(tmp_path: Path) -> None:
    executor = load_executor(CONFIG)
    executor.initialize_cache(CONFIG)
    start_capture(str(tmp_path / "a.cap"), CONFIG, executor.info, "test", 0).close()
    executor.close()
    out = tmp_path / "a.json"
    assert main(["replay", str(tmp_path / "a.cap"), "--perfetto", str(out)]) == 0
    assert {event["name"] for event in json.loads(out.read_text())["traceEvents"]} == {"process_name"}
