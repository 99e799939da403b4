"""Numbers that another process reads while the engine writes them: each is as it was or as it is, never in between."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from core.capture.engine import make_header
from core.capture.flight_recorder import FlightRecorder
from core.executors.by_name import load_executor
from core.process.black_box import BlackBox
from ipc.records.black_box import BlackBoxFile
from ipc.records.flight_ring import FlightFile
from tests.captures import CONFIG
from tests.placed import placed

ROOT = Path(__file__).parents[3]
_RING = """
from ipc.records.flight_ring import HALF, numbers_of
memory, before = mmap.mmap(fd, 0, prot=mmap.PROT_READ), 0
for _ in range(200_000):
    generation, used = HALF.unpack(memory[numbers_of(0)])
    assert generation == 1 and used >= before, (generation, used, before)
    before = used
"""
_BOX = """
from ipc.records.black_box import BlackBoxReader
reader = BlackBoxReader(fd)
before = reader.read()
for _ in range(100_000):
    now = reader.read()
    assert (now.epoch, now.pid) == (5, before.pid), now
    assert now.num_turns >= before.num_turns and now.turned_ns >= before.turned_ns, (now, before)
    before = now
"""


def read_meanwhile(code: str, fd: int, write: Callable[[], object]) -> None:
    """Write again and again while another process runs code, which reads."""
    start = f"import mmap, sys\nfd = {fd}\nsys.path.insert(0, {str(ROOT)!r})\n"
    command = [sys.executable, "-c", placed(start + code)]
    with subprocess.Popen(command, pass_fds=[fd], stderr=subprocess.PIPE, text=True) as reader:
        while reader.poll() is None:
            for _ in range(1000):
                write()
        assert reader.stderr is not None
        assert (reader.returncode, reader.stderr.read()) == (0, "")


def test_the_flight_ring_always_has_its_half() -> None:
    """Struct.pack_into() would write zeros first: who looks then, or after the engine died there, finds nothing."""
    ring, executor = FlightFile(1 << 26), load_executor(CONFIG)
    executor.initialize_cache(CONFIG)
    recorder = FlightRecorder(ring.fd, make_header(CONFIG, executor.info, "test", 0), 3600)
    try:
        read_meanwhile(_RING, ring.fd, lambda: recorder.add_packed(0, bytes(24)))
    finally:
        recorder.close()


def test_the_black_box_never_has_half_a_number() -> None:
    page = BlackBoxFile(8)
    box = BlackBox(page.fd, 8, epoch=5)
    read_meanwhile(_BOX, page.fd, lambda: box.turn(1))
