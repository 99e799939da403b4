"""Programs as users start them: in a process group of their own, with the environment's commands on the path."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def started(command: list[str], folder: Path, stdin: int | None = None) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a command in a folder, with its output in the files stdout and stderr there. Nothing outlives the block."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    folder.mkdir(exist_ok=True)
    with (folder / "stdout").open("wb") as output, (folder / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PATH": path},
            stdin=stdin,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(command: list[str], folder: Path, stdin: int | None = None) -> tuple[int, str, str]:
    """Run a command in a folder to its end -> (exit code, stdout, stderr)."""
    with started(command, folder, stdin) as process:
        code = process.wait(timeout=280)
    return code, (folder / "stdout").read_text(), (folder / "stderr").read_text()


def free_port() -> int:
    """Return a TCP port of the loopback that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
