"""FreedMemory: memory that the process has freed and the C library keeps, given back to the system.

glibc keeps most of what a burst took, in case it is needed again. ALLOCATION limits what it can keep, and FreedMemory
returns the rest.
"""

import ctypes
import resource

#: Environment of the process, for glibc. One arena: otherwise each thread has one, and keeps there what its busiest
#: moment took, out of reach of the others. A fixed size from which a block is a mapping of its own, which is returned
#: when it is freed: otherwise this size grows with the largest freed block, up to 32 MiB, so bodies and long answers
#: leave holes between small blocks. It is above the 256 KiB that a read takes: with 128 KiB, 1,000 streams took 15 %
#: more CPU time an event. And how much is kept at the end of the arena, so that usual traffic makes no system
#: calls.
ALLOCATION = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 20),
}
#: Bytes that are worth a trim, which takes a few milliseconds.
WORTH_BYTES = 16 << 20

_MALLINFO = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)
_PAGE = resource.getpagesize()
_libc = ctypes.CDLL(None)


class _MallInfo(ctypes.Structure):
    """struct mallinfo2 of glibc: hblkhd are the bytes of blocks with mappings of their own, uordblks of all others."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO)


_trim = getattr(_libc, "malloc_trim", None)
_mallinfo = getattr(_libc, "mallinfo2", None)  # of glibc 2.33
if _mallinfo is not None:
    _mallinfo.restype = _MallInfo


class FreedMemory:
    """The freed memory of this process. Without glibc it does nothing."""

    def __init__(self) -> None:
        self._least_idle = idle_bytes()  # since the last trim

    def give_back(self, worth: int = WORTH_BYTES) -> None:
        """Return freed memory to the system, if there may be this many bytes more of it than after the last time."""
        idle = idle_bytes()
        if idle >= self._least_idle + worth and _trim is not None:
            _trim(0)
            idle = self._least_idle = idle_bytes()
        self._least_idle = min(self._least_idle, idle)


def idle_bytes() -> int:
    """Return the process's memory that no block of the C library uses: what it keeps, and what others allocated."""
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * _PAGE
    if _mallinfo is None:
        return resident
    found = _mallinfo()
    return resident - int(found.uordblks) - int(found.hblkhd)
