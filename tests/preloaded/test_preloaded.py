"""A process that is forked (tests/preloaded/start.py) is to others what exec would have made."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from frontend.engine.process import EngineProcess
from ipc.options.config import EngineConfig
from tests.frontend.http.caller import serving
from tests.preloaded.start import EXEC


def stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def has_room(words: bytes) -> bool:
    """Whether a process is forked: its forker's command line was longer."""
    return words.endswith(b"\0\0")


@pytest.mark.checkout
def test_an_engine_is_a_child_with_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen = []
    for is_forked in (True, False, True):
        if not is_forked:
            monkeypatch.setenv(EXEC, "1")
        with EngineProcess(EngineConfig(executor="fake")) as engine:
            engine.wait_ready()
            pid = engine.pid
            words = command_line(pid)
            parent, group, session = stat(pid)[1:4]
            folder, blocked = Path(f"/proc/{pid}/cwd").readlink(), Path(f"/proc/{pid}/status").read_text()
            assert has_room(words) == is_forked
            assert int(parent) == os.getpid()
            seen.append((words.split(b"\0")[:4], group, session, folder, "SigBlk:\t0000000000000000" in blocked))
        assert engine.exit_code == 0
        monkeypatch.delenv(EXEC, raising=False)
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.checkout
def test_a_server_forks_its_engine_and_its_http_worker() -> None:
    """With its signal handlers set, and the variables of malloc that the worker has."""
    with serving("--executor", "fake", "--executor-option", "vocab_size=1000") as caller:
        children = Path(f"/proc/{caller.process.pid}/task/{caller.process.pid}/children").read_text().split()
        lines = map(command_line, map(int, children))
        forked = {words.split(b"\0")[3] for words in lines if b"\0-m\0" in words and has_room(words)}
        assert forked == {b"core", b"frontend.http"}
        assert caller.complete([1, 2], max_tokens=3).status == 200


@pytest.mark.parametrize("words", [["version"], ["nonsense"], ["inspect", "missing"]])
def test_a_command_prints_and_exits_the_same(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def ran() -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "engine_core", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    forked = ran()
    monkeypatch.setenv(EXEC, "1")
    assert ran() == forked


def test_another_setting_of_the_interpreter_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked process has the settings of the interpreter that it was forked from."""
    monkeypatch.setenv("PYTHONUTF8", "0")
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    done = subprocess.run([sys.executable, "-m", "engine_core", "é"], capture_output=True, check=False)
    assert "é".encode("latin-1") in done.stderr
