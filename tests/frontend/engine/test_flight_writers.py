"""Engines that are killed in real processes: of each there is a file that replays, and nothing else is left."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from core.capture.file import CaptureFile
from frontend.engine.supervised_engine import SupervisedEngine
from tests.fake_options import fake_options, with_options
from tests.frontend.engine.supervised import (
    EAGER,
    FAKE,
    GREEDY,
    PATIENCE_S,
    check,
    connected,
    kill,
    submit,
    supervised,
    wait_for_end,
)
from tests.placed import placed
from tools.cli import main

ROOT = Path(__file__).resolve().parents[3]
NUM_KILLS = int(os.environ.get("SOAK_KILLS", "200"))
#: Longer than any engine of the soak lives.
ENDLESS = msgspec.structs.replace(GREEDY, max_tokens=50_000)
MOST_BYTES = 128 << 20  # of an engine of the fake executor, twice what it was in the recorded soak


def wait_for_file(folder: Path, known: set[str]) -> Path:
    """The next file of a folder that is whole."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        with contextlib.suppress(FileNotFoundError):
            for name in set(os.listdir(folder)) - known:
                if name.endswith(".cap"):
                    known.add(name)
                    return folder / name
        time.sleep(0.02)
    raise AssertionError("no file was written")


def replays(path: Path, num_begun: int) -> CaptureFile:
    """Replay a redacted file; its last record is at most two steps older than the engine's last step."""
    assert main(["replay", str(path)]) == 0
    file = CaptureFile(path)
    assert file.header.is_redacted
    assert num_begun - 2 <= file.first_step + file.num_steps
    return file


@contextlib.contextmanager
def recorded(folder: Path, **options: object) -> Iterator[SupervisedEngine]:
    config = with_options(FAKE, flight_recorder_folder=str(folder), **options)
    with supervised(config, EAGER, listen=f"ipc://{folder.parent}/{folder.name}.s") as engine:
        yield engine


def private_bytes(pid: int) -> int:
    """Memory of a process that it shares with no file."""
    return next(
        int(line.split()[1]) << 10
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("RssAnon:")
    )


def run_until(engine: SupervisedEngine, num_steps: int, num_running: int = 0) -> None:
    """Return after so many steps, one of them with so many requests."""
    box, end = engine.process.black_box, time.monotonic() + PATIENCE_S
    while (last := box.read()).epoch != engine.process.epoch or (
        last.num_ended < num_steps or last.num_running < num_running
    ):
        time.sleep(0.002)
        assert time.monotonic() < end, "the engine runs no steps"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_engine_leaves_a_file_that_replays(tmp_path: Path, number: int) -> None:
    folder = tmp_path / "flights"
    with recorded(folder) as engine, contextlib.closing(connected(engine)) as client:
        numbers = submit(client)
        run_until(engine, 30, num_running=len(numbers))
        kill(engine.process, number)
        path = wait_for_file(folder, set())
        check(client, numbers)
        begun = CaptureFile(path)
        assert begun.num_inputs >= len(numbers)
        replays(path, 30)


def test_an_engine_that_ends_as_it_was_told_leaves_none(tmp_path: Path) -> None:
    with recorded(tmp_path / "a") as engine, contextlib.closing(connected(engine)) as client:
        submit(client)
        run_until(engine, 5)
        kill(engine.process, signal.SIGTERM)
        kill(engine.process, signal.SIGTERM)
        assert wait_for_end(engine)
    assert not (tmp_path / "a").exists()


def test_a_request_that_kills_the_engine_is_in_the_file(tmp_path: Path) -> None:
    """The poison arrives for the very step that it ends: it is among the messages behind the last step."""
    with (
        recorded(tmp_path / "a", executor_options=fake_options(poison="abort:7:1")) as engine,
        contextlib.closing(connected(engine)) as client,
    ):
        submit(client, 2)
        run_until(engine, 5)
        number = client.submit([7], GREEDY, seed=0)
        path = wait_for_file(tmp_path / "a", set())
        file = CaptureFile(path)
        (last,) = file.last_inputs()
        assert last.message.number == number  # type: ignore[union-attr]


def test_dump_writes_the_recorder_of_a_running_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with recorded(tmp_path / "own") as engine, contextlib.closing(connected(engine)) as client:
        command = ["control", "dump", "--connect", engine.address]
        assert main(command) == 1
        assert "has not run a step yet" in capsys.readouterr().err
        numbers = submit(client)
        run_until(engine, 20)
        out = tmp_path / "out.cap"
        assert main([*command, "--out", str(out)]) == 0
        assert "of engine process" in capsys.readouterr().out
        replays(out, 20)
        assert main([*command, "--out", str(out)]) == 1
        assert "never overwritten" in capsys.readouterr().err
        assert main(command) == 0
        replays(wait_for_file(tmp_path / "own", set()), 20)
        check(client, numbers)


def test_without_a_recorder_there_is_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with recorded(tmp_path / "a", flight_recorder_bytes=0) as engine, contextlib.closing(connected(engine)) as client:
        numbers = submit(client, 4)
        run_until(engine, 5)
        assert main(["control", "dump", "--connect", engine.address]) == 1
        assert "cannot be read" in capsys.readouterr().err
        kill(engine.process)
        check(client, numbers)
    assert not (tmp_path / "a").exists()


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.usefixtures("capsys")
def test_every_kill_leaves_a_file(tmp_path: Path) -> None:
    """Kills at random moments under load, with a recorder so small that its halves take turns all the time.

    Each file is whole, replays with 0 differences and ends at most two steps before the engine's last one; the engine's
    memory stays within a bound, whatever was recorded.
    """
    rng, known = random.Random(int(os.environ.get("SOAK_KILLS_SEED", "1"))), set[str]()
    num_inside = num_steps = most_bytes = 0
    small = {
        "flight_recorder_bytes": 2**20,
        "flight_recorder_seconds": 1,
        "executor_options": fake_options(step_us=1000),
    }
    with (
        recorded(tmp_path / "a", **small) as engine,
        contextlib.closing(connected(engine)) as client,
    ):
        for index in range(NUM_KILLS):
            numbers = submit(client, rng.choice([1, 8, 24]), ENDLESS)
            run_until(engine, 1)
            time.sleep(rng.random() * 3)
            num_begun = engine.process.black_box.read().num_begun
            most_bytes = max(most_bytes, private_bytes(engine.process.pid))
            kill(engine.process, signal.SIGKILL)
            client.abort(numbers)
            path = wait_for_file(tmp_path / "a", known)
            file = replays(path, num_begun)
            assert file.num_steps > 0, (index, num_begun)
            num_inside += file.begins_inside
            num_steps += file.num_steps
            path.unlink()
    assert num_inside > 0 or NUM_KILLS < 20
    assert most_bytes < MOST_BYTES
    print(
        f"{NUM_KILLS} kills, {num_steps} steps replayed, {num_inside} files from a checkpoint, {most_bytes >> 20} MiB"
    )


def test_a_file_that_takes_too_long_is_given_up() -> None:
    words = "import sys; from core.capture import write_flight as w; w._CPU_S, w._NICE = 1, 0\n"
    words += "w.read_ring = lambda fd: []\n"
    words += "def spin(*_):\n    while True: pass\n"
    words += "w.write_flight = spin; w.limit_process(); code = w.main(['0', '7', 'text'])\n"
    words += "w.log.flush(5); sys.exit(code)"
    ended = subprocess.run([sys.executable, "-c", placed(words)], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1, ended.stderr
    assert "the flight recorder of engine process 7 was not written: it takes over 1 s" in ended.stderr
