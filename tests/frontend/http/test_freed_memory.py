"""Memory that the HTTP process has freed goes back to the system, whichever thread took it."""

import ctypes
import re
import threading
from collections.abc import Iterator

import pytest

from frontend.http.freed_memory import WORTH_BYTES, FreedMemory, idle_bytes
from ipc.files.model_files import resolve_model
from tests.frontend.http.caller import Caller, serving
from tests.hostile.work.test_witness import FAKE, http_pid

_BLOCK, _NUM_BLOCKS = 64 << 10, 1024  # too small for mappings of their own
#: Of glibc: memory of a thread's own is taken in parts of this size, of which the end is reserved and not accessible.
_ARENA_BYTES = 64 << 20
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (...)p", re.MULTILINE)


def test_what_blocks_between_others_held_goes_back() -> None:
    """Freed blocks below one that is still used: the C library alone returns none of them."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    freed = FreedMemory()
    blocks = [libc.malloc(_BLOCK) for _ in range(_NUM_BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, _BLOCK)
    freed.give_back()
    used = idle_bytes()
    for block in blocks[::2]:
        libc.free(block)
    kept = idle_bytes()
    assert kept - used > WORTH_BYTES
    freed.give_back()
    assert kept - idle_bytes() > WORTH_BYTES
    for block in blocks[1:257:2]:  # 8 MiB: too little, unless there is time for it
        libc.free(block)
    kept = idle_bytes()
    freed.give_back()
    assert idle_bytes() > kept - (4 << 20)
    freed.give_back(0)
    assert idle_bytes() < kept - (6 << 20)
    for block in blocks[257::2]:
        libc.free(block)


@pytest.fixture(scope="module")
def caller() -> Iterator[Caller]:
    with serving(*FAKE, "-m", str(resolve_model(None)), "--served-model-name", "demo") as caller:
        yield caller


def test_no_thread_keeps_memory_of_its_own(caller: Caller) -> None:
    """Each of a server's threads kept what its longest text had taken: 360 MiB after half an hour of long texts."""
    body = {"prompt": "lorem ipsum dolor " * 3000}

    def ask() -> None:
        for _ in range(3):
            assert caller.post("/tokenize", body).status in (200, 400)

    askers = [threading.Thread(target=ask) for _ in range(6)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    with open(f"/proc/{http_pid(caller)}/maps") as file:
        maps = [(int(begin, 16), int(end, 16), mode) for begin, end, mode in _MAPPING.findall(file.read())]
    assert maps
    reserved = {end for _, end, mode in maps if mode == "---"}
    assert [begin for begin, _, mode in maps if mode == "rw-" and begin + _ARENA_BYTES in reserved] == []
