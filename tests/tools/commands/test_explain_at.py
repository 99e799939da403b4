"""`engine-core explain --at STEP FILE`: what the engine itself said at that step, from any checkpoint before it."""

import json
import random
from pathlib import Path

import msgspec
import pytest

from core.capture import writer as capture_writer
from core.capture.engine import CapturedEngine, start_capture
from core.executors.by_name import load_executor
from core.scheduling.explain import explain
from ipc.wire.scheduling_messages import Explain, Explanation, SchedulingState
from tests.captures import CONFIG, make_request
from tools.cli import main
from tools.commands.explain import to_json


def test_the_past_is_explained_as_the_engine_did_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(capture_writer, "CHECKPOINT_BYTES", 3000)
    monkeypatch.setattr(capture_writer, "CLOSE_S", 60.0)
    rng, path = random.Random(3), tmp_path / "a.cap"
    config = msgspec.structs.replace(CONFIG, num_blocks_override=14)
    executor = load_executor(config)
    executor.initialize_cache(config)
    writer = start_capture(str(path), config, executor.info, "test", 0)
    captured, said = CapturedEngine(config, executor, writer), list[Explanation]()
    for step in range(60):
        inbox = [(step % 3, make_request(step, rng))] if step < 30 else []
        captured.step(inbox, 10**12 + step * 1_000_000)
        now = explain(captured.engine.scheduler, "fcfs", 0, Explain(0, limit=20), 10**12 + step * 1_000_000)
        assert isinstance(now, Explanation)
        said.append(now)
    writer.close()
    assert any(one.num_waiting > 3 for one in said)
    for step in (0, 17, 29, 45, 59):
        assert main(["explain", "--at", str(step), str(path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == json.loads(to_json(said[step]))
    waiting = next(one for one in said[29].requests if one.state is SchedulingState.WAITING)
    assert main(["explain", f"{waiting.session}/{waiting.number}", "--at", "29", str(path)]) == 0
    assert "in the queue" in capsys.readouterr().out
    for wrong, text in ((["--at", "60", str(path)], "the steps 0 to 59"), (["--at", "x", str(path)], "from 0,")):
        assert main(["explain", *wrong]) != 0
        assert text in capsys.readouterr().err
    assert main(["explain", "2/29", "--at", "3", str(path)]) != 0
    assert "no live request 2/29" in capsys.readouterr().err
