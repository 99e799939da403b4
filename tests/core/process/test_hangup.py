"""The end of a terminal: SIGHUP to owner and engine together, and what is swept up when both were killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq

from ipc.wire import sockets
from ipc.wire.sockets import bind_router, held_private_address, private_ipc_address, remove_private_address
from tests.placed import placed
from tests.raw_client import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
#: nohup's children inherit that SIGHUP is ignored, and this suite may be one.
HEARS_HANGUPS = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
OWNER = """
import time
from frontend.llm import LLM
llm = LLM(executor="fake", skip_tokenizer_init=True, num_blocks_override=100)
print("up", flush=True)
time.sleep(60)
"""
SERVE = """
import sys
from tools.cli import main
sys.exit(main(["serve", "--executor", "fake", "--listen", f"ipc://{sys.argv[1]}/s", "--num-blocks-override", "100"]))
"""
#: The signal comes when the loop runs, and before the command has set its handlers for that.
IN_BETWEEN = """
import os, signal, sys
from tools.commands import serve
from tools.cli import main

def run(watch, usual=serve.uvloop.run):
    async def watch_after_a_signal():
        os.kill(os.getpid(), signal.SIGHUP)
        return await watch
    return usual(watch_after_a_signal())

serve.uvloop.run = run
sys.exit(main(["serve", "--executor", "fake", "--listen", f"ipc://{sys.argv[1]}/s", "--num-blocks-override", "100"]))
"""


def hang_up(code: str, folder: Path) -> int:
    """Start a program as leader of its group; SIGHUP to the group once it is up. Return its exit status."""
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": ""}
    command = [sys.executable, "-c", HEARS_HANGUPS + placed(code), str(folder)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, start_new_session=True
    ) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline()
            os.killpg(child.pid, signal.SIGHUP)
            child.stdout.read()  # ends with the last process that has it
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
    return child.returncode


@pytest.mark.parametrize(("code", "status"), [(OWNER, -signal.SIGHUP), (SERVE, 0)])
def test_a_hangup_leaves_no_files(tmp_path: Path, code: str, status: int) -> None:
    assert hang_up(code, tmp_path) == status
    end = time.monotonic() + PATIENCE_S
    while left := [path for path in tmp_path.rglob("*") if not path.is_dir()]:
        assert time.monotonic() < end, left
        time.sleep(0.01)


def test_a_signal_counts_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HEARS_HANGUPS + placed(IN_BETWEEN), str(tmp_path)]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": ""}
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_addresses_of_the_dead_are_swept_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    context: sockets.Context = zmq.Context()
    alive = bind_router(context, private_ipc_address(), is_private=True)
    dead = private_ipc_address()
    path = Path(sockets.ipc_path(dead))
    path.touch()
    Path(f"{path}.lock").touch()
    not_ours = tmp_path / f"{sockets.PRIVATE_PREFIX}notes"
    not_ours.mkdir()
    private_ipc_address()  # its owner was killed, and its engine removed its files before it ended
    with held_private_address() as held:  # its owner lives, and the next engine is not there yet
        young = private_ipc_address()
        for folder in tmp_path.iterdir():
            if folder.name not in young:
                os.utime(folder, (0, 0))
        Path(sockets.ipc_path(young) + ".lock").touch()
        last = private_ipc_address()
        left = {str(one) for one in tmp_path.iterdir()}
        assert left == {os.path.dirname(sockets.ipc_path(one)) for one in (alive.address, held, young, last)} | {
            str(not_ours)
        }
    assert not Path(sockets.ipc_path(held)).parent.exists()
    alive.close(0)
    context.term()
    for address in (young, last):
        remove_private_address(address)
