"""The flight ring: shared memory with the last records of an engine's capture, which survives the engine's death.

It has two halves. Each begins with the header of a capture and, except for the engine's first one, with a checkpoint,
so that each replays on its own. Then follow frames of ipc/records/log_frames.py, as in a capture. The engine fills one
half and then the other. The numbers before them are little-endian int64: bytes of a half; then for each half its
generation (1, 2, 3, ... in the order in which halves were begun, 0 = it is being prepared) and its bytes in use.
"""

import mmap
import os
import struct
import weakref
from typing import NamedTuple

from ipc.machine.memory_files import find_memory_files, make_memory_file

NAME = "engine-core-flight"  # of the memory file, as shown in /proc/PID/fd
HALVES_AT = 4096  # where the first half begins; the second one follows it
_SIZE = struct.Struct("<q")
HALF = struct.Struct("<2q")  # generation, bytes in use
_TRIES = 100  # to read a ring while it is written


def numbers_of(half: int) -> slice:
    """Return the place of the numbers of a half (0 or 1).

    They are written as bytes that are ready. Struct.pack_into() writes zeros first and then byte after byte: a process
    that reads at that moment, or after the engine died in it, would find no half.
    """
    begin = _SIZE.size + half * HALF.size
    return slice(begin, begin + HALF.size)


class Half(NamedTuple):
    """The content of one half at one time."""

    generation: int
    data: bytes


class FlightFile:
    """A new ring, for the owner of one engine process.

    It is freed once this object and all open descriptors are gone.
    """

    def __init__(self, num_bytes: int) -> None:
        half_bytes = num_bytes // 2
        self.fd = make_memory_file(NAME, HALVES_AT + 2 * half_bytes)
        weakref.finalize(self, os.close, self.fd)
        os.pwrite(self.fd, _SIZE.pack(half_bytes), 0)


def ring_half_bytes(memory: mmap.mmap) -> int:
    """Return the bytes of a half."""
    half_bytes: int = _SIZE.unpack_from(memory)[0]
    return half_bytes


def read_ring(fd: int) -> list[Half]:
    """Return the halves that have records, the older one first. An engine may write at the same time."""
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as memory:
        size = ring_half_bytes(memory)
        for _ in range(_TRIES):
            before = [HALF.unpack(memory[numbers_of(half)]) for half in (0, 1)]
            halves = [
                Half(generation, memory[HALVES_AT + half * size : HALVES_AT + half * size + used])
                for half, (generation, used) in enumerate(before)
            ]
            after = [HALF.unpack(memory[numbers_of(half)])[0] for half in (0, 1)]
            if [generation for generation, _ in before] == after:
                break
        return sorted(half for half in halves if half.generation and half.data)


def find_ring(pid: int) -> list[Half]:
    """Return read_ring()'s result for an engine process of this user on this machine; empty: it has no ring."""
    for fd in find_memory_files(pid, NAME):
        return read_ring(fd)
    return []
