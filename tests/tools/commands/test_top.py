"""`engine-core top`, in a terminal of its own: what it shows, what its keys do, and the terminal that it leaves."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from frontend.engine.process import EngineProcess
from ipc.errors import CallFailedError
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import FinishReason
from tests.tools.test_cli import command, environment, run
from tools.commands.control import write_owner_file

LONG = SamplingParams(max_tokens=100_000, ignore_eos=True)
NUM_ROWS = 2


class Terminal:
    """A program in a terminal of 30 lines and 110 columns."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (30, 110))
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        size = {"COLUMNS": "110", "LINES": "30"}
        self.process = subprocess.Popen(
            command("top", *arguments), env=environment() | size, stdin=slave, stdout=slave, stderr=slave
        )
        self.text = ""

    def until(self, pattern: str) -> str:
        """Read until the pattern has been shown; return its match, and forget what was shown before."""
        end = time.monotonic() + 20
        while not (found := re.search(pattern, self.text)):
            assert time.monotonic() < end, (pattern, self.text[-3000:])
            if select.select([self.master], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    self.text += os.read(self.master, 65_536).decode(errors="replace")
        self.text = self.text[found.end() :]
        return found[0]

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def wait(self) -> int:
        """Return the exit status; what the program shows meanwhile is read."""
        end = time.monotonic() + 20
        while self.process.poll() is None:
            assert time.monotonic() < end, self.text[-3000:]
            if select.select([self.master], [], [], 0.05)[0]:
                self.text += os.read(self.master, 65_536).decode(errors="replace")
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture(name="engine")
def an_engine() -> Iterator[EngineProcess]:
    config = EngineConfig(executor="fake", max_num_seqs=NUM_ROWS, request_metrics=True)
    with EngineProcess(config) as process:
        yield process


@pytest.fixture(name="client")
def a_client(engine: EngineProcess) -> Iterator[EngineClient]:
    """A client with two long requests that run and one that waits."""
    client = EngineClient(ZmqTransport(engine.address))
    for number in range(NUM_ROWS + 1):
        client.submit([7, number], LONG, seed=0)
    end = time.monotonic() + 10
    while client.statistics().num_running < NUM_ROWS:
        assert time.monotonic() < end
        time.sleep(0.01)
    yield client
    client.close()


@pytest.fixture(name="start")
def start_top() -> Iterator[Callable[..., Terminal]]:
    started: list[Terminal] = []

    def start(*arguments: str) -> Terminal:
        started.append(Terminal(*arguments))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_it_shows_the_engine_explains_and_aborts(
    engine: EngineProcess, client: EngineClient, start: Callable[..., Terminal], tmp_path: Path
) -> None:
    owner_file = tmp_path / "owner"
    write_owner_file(str(owner_file), engine.owner_token)
    top = start("--connect", engine.address, "--owner-file", str(owner_file), "--interval", "0.1")
    top.until(rf"running {NUM_ROWS}/{NUM_ROWS}  waiting 1 ")
    top.until(r"tokens/s [1-9][0-9,]* out")
    top.until(r"every row is taken")
    top.press("\x1b[B")  # down: the second request
    top.press("\r")
    top.until(r"request \d+/1: running")
    top.press("a")
    top.until(r"/1 was aborted")
    end = time.monotonic() + 10
    while client.read(1).finish is not FinishReason.ABORT:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert [client.read(number).finish for number in (0, 2)] == [FinishReason.NONE] * 2
    top.press("p")
    top.until(r"PAUSED: no request begins")
    top.press("r")
    top.until(r"resumed")
    top.press("q")
    assert top.wait() == 0
    assert termios.tcgetattr(top.slave) == top.before
    assert "\x1b[?1049l" in top.text  # the screen that was there before


def test_keys_for_the_owner_say_so(engine: EngineProcess, client: EngineClient, start: Callable[..., Terminal]) -> None:
    top = start("--connect", engine.address, "--interval", "0.1")
    top.until(r"waiting 1 ")
    top.press("a")
    top.until(r"only the owner")
    assert not client.read(0).finish
    with pytest.raises(CallFailedError, match="PERMISSION_DENIED"):
        client.stop_request(1, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_the_terminal_as_it_was(
    engine: EngineProcess, start: Callable[..., Terminal], number: signal.Signals
) -> None:
    top = start("--connect", engine.address, "--interval", "0.1")
    top.until(r"running 0/2")
    assert termios.tcgetattr(top.slave) != top.before
    top.process.send_signal(number)
    assert top.wait() == 128 + number
    assert termios.tcgetattr(top.slave) == top.before
    assert "\x1b[?1049l" in top.text


def test_it_outlives_the_engine(engine: EngineProcess, start: Callable[..., Terminal]) -> None:
    """It says what happened, and goes on when an engine answers at the address again."""
    top = start("--connect", engine.address, "--interval", "0.1")
    top.until(r"running 0/2")
    engine.stop(0)
    top.until(r"lost 1 times")
    top.press("q")
    assert top.wait() == 0


def test_without_a_terminal_it_is_plain_text_once(engine: EngineProcess, client: EngineClient) -> None:
    done = run("top", "--connect", engine.address, "--interval", "0.2")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert f"running {NUM_ROWS}/{NUM_ROWS}  waiting 1 " in done.stdout
    assert "every row is taken" in done.stdout
    assert re.search(r"between tokens p50 ≤[\d.]+ ms", done.stdout), done.stdout


def test_json_lines(engine: EngineProcess) -> None:
    with subprocess.Popen(
        command("top", "--connect", engine.address, "--json", "--interval", "0.05"),
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        first, second = (json.loads(process.stdout.readline()) for _ in range(2))
        process.kill()
    assert (first["rates"], first["statistics"]["num_running"]) == (None, 0)
    assert second["rates"]["tokens_per_s"] == 0


def test_no_engine_is_an_error(tmp_path: Path) -> None:
    done = run("top", "--connect", f"ipc://{tmp_path}/none")
    assert done.returncode == 1
    assert "engine-core: error:" in done.stderr


def test_stopping_what_is_not_there_does_nothing(engine: EngineProcess, client: EngineClient) -> None:
    with owner_of(engine) as owner:
        owner.stop_request(1, 12_345)
        owner.stop_request(99, 0)
    assert client.statistics().num_running == NUM_ROWS


@contextlib.contextmanager
def owner_of(engine: EngineProcess) -> Iterator[EngineClient]:
    owner = EngineClient(ZmqTransport(engine.address), owner_token=engine.owner_token)
    yield owner
    owner.close()
