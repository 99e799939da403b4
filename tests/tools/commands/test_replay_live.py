"""Engines that end otherwise than in order, and captures sent to a running engine."""

import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from core.capture.file import CaptureFile
from core.capture.records import Step, decode_record
from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from frontend.engine.process import EngineProcess
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest
from tests.captures import (
    CONFIG,
    NUM_REQUESTS,
    VOCAB,
    change,
    error,
    find,
    frames_of,
    replaced,
    replay,
)
from tests.fake_options import fake_options
from tests.fake_tokens import fake_tokens
from tests.raw_client import RawClient
from tools.cli import main
from tools.commands.replay.differences import unpack

LONG = 40_000  # tokens: more than any test waits for


# --- engines that end otherwise --------------------------------------------------------------------------------------


def long_config(path: Path) -> EngineConfig:
    return EngineConfig(
        executor="fake", executor_options=fake_options(vocab_size=VOCAB), max_model_len=2 * LONG, capture=str(path)
    )


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
        os.kill(engine.pid, signal.SIGKILL)
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
            client.add(number, [3, 4, number], 600)
            assert client.finish(number) == [fake_tokens([3, 4, number], 600, VOCAB)]
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
    assert recorded["ttft_ms"]["mean"] > 0 < replayed["tpot_ms"]["mean"]  # tokens of most requests may come together
    assert report["lateness_ms"]["count"] == NUM_REQUESTS
    span = 0.0 if timing == ["--asap"] else last_arrival(captures["fake"]) / report["speed"]
    assert report["seconds"] >= span - 0.001


def test_live_compares_all_choices_and_the_beams_of_a_search(
    server: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, kinds = tmp_path / "run.cap", ({"n": 3}, {"n": 2, "best_of": 3, "use_beam_search": True, "temperature": 0})
    with EngineProcess(msgspec.structs.replace(CONFIG, capture=str(path))) as engine:
        client = EngineClient(ZmqTransport(engine.address))
        for seed, options in enumerate(kinds):
            params = SamplingParams(max_tokens=9, ignore_eos=True, **options)  # type: ignore[arg-type]
            number = client.submit([3, 4, 5], params, seed=seed)
            while not all(client.read(number, 0, choice).finish for choice in range(params.n)):
                client.wait(np.array([number]), 10)
        client.close()
    status, report = replay(capfd, path, "--mode", "live", "--connect", server, "--asap")
    assert (status, report["differences"], report["failures"]) == (0, [], [])
    assert (report["num_requests"], report["num_tokens"]) == (2, 5 * 9)


def last_arrival(path: Path) -> float:
    """Seconds after the first step."""
    turns = list(CaptureFile(path).turns())
    times = [turn.step.now_ns for turn in turns if any(isinstance(one[1], AddRequest) for one in turn.inbox)]
    return (times[-1] - turns[0].step.now_ns) / 1e9


def test_live_finds_a_token(copy: Path, server: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The changed token belongs to a request that was not aborted or preempted: the scheduler does not see it."""
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
    assert f"position {found['position']}: expected token {right ^ 1}, got {right}\n1 difference, 0 failures" in out
    assert "TTFT recorded" in out


def test_live_refuses_another_model(captures: dict[str, Path], server: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert error(capfd, captures["real"], "--mode", "live", "--connect", server)[0] == 5
