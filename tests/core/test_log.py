"""Standard error that nobody reads, or that is full, holds nobody up."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from core.process import loop as process
from tests.placed import placed

ROOT = Path(__file__).resolve().parents[2]

#: Says far more than a pipe holds, and then how long that took.
SAYING = """
import os, sys, time
from core import log
begin = time.monotonic()
for number in range(20_000):
    log.say(f"line {number} " + "x" * 100)
os.write(1, f"{time.monotonic() - begin:.3f}\\n".encode())
log.flush(float(sys.argv[1]))
os._exit(0)
"""


def say(stderr: int, wait: str) -> tuple[float, float]:
    """(seconds to say all, seconds until the process had ended)."""
    begin = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.run(
        [sys.executable, "-c", placed(SAYING), wait], stdout=subprocess.PIPE, stderr=stderr, env=environment, check=True
    )
    return float(child.stdout), time.monotonic() - begin


def test_a_pipe_that_nobody_reads() -> None:
    read, write = os.pipe()
    try:
        saying, ending = say(write, "0.2")
    finally:
        os.close(read)
        os.close(write)
    assert saying < 5.0  # a blocking write would never end
    assert ending < 20.0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk() -> None:
    with open("/dev/full", "wb") as full:
        saying, _ = say(full.fileno(), "5")
    assert saying < 5.0


def test_what_is_said_is_written(tmp_path: Path) -> None:
    code = "from core import log; log.say('one\\nline'); log.say('two'); log.flush(5.0); import os; os._exit(0)"
    done = subprocess.run([sys.executable, "-c", placed(code)], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stderr == "one\nline\ntwo\n"


def test_a_failing_engine_tells_its_clients_although_nobody_reads_its_stderr() -> None:
    """Checked on the order in core/process/loop.py: what is said is queued, the clients are told, then it is
    flushed."""
    code = """
import os, threading
from core.process import loop as process
class Broken:
    has_work = has_unfinished = True
    def step(self, inbox, now): raise RuntimeError("x" * 10)
class Io:
    class inbox:
        has_ended = False
    will_be_replaced = False
    def take(timeout): return []
    def finish(message, timeout): os.write(1, message.error.encode())
from core import log
for _ in range(3000): log.say("y" * 100)
code = process.run(Broken(), Io, lambda: False)
os._exit(code)
"""
    read, write = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", placed(code)], stdout=subprocess.PIPE, stderr=write, text=True, check=False, cwd=ROOT
        )
    finally:
        os.close(read)
        os.close(write)
    assert (done.returncode, done.stdout) == (process.EXIT_FAILED, "RuntimeError: xxxxxxxxxx")
