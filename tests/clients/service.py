"""A server of this checkout for programs of others, and the environments of these programs."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 300


def environment(folder: Path, where: Path) -> Path:
    """Make the environment of this folder, unless it is there -> its Python."""
    python = where / folder.name / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", where / folder.name], check=True)
        install = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        subprocess.run([*install, "-r", folder / "requirements.txt"], check=True)
    return python


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def serving(*options: str | Path, **variables: str) -> Iterator[int]:
    """A server with these options of `engine-core serve`, from when it is ready -> its port."""
    port = free_port()
    command = [sys.executable, "-m", "tools.cli", "serve", *options, "--http", f"127.0.0.1:{port}"]
    server = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **variables})
    try:
        end = time.monotonic() + PATIENCE_S
        while not _is_ready(port):
            if server.poll() is not None:
                raise SystemExit(f"the server ended with exit code {server.returncode}")
            if time.monotonic() > end:
                raise SystemExit(f"the server was not ready after {PATIENCE_S} s")
            time.sleep(0.1)
        yield port
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    finally:
        server.kill()
        server.wait()


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
            return True
    except OSError:
        return False
