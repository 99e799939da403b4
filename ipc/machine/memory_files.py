"""Memory files: files without a name on any disk (memfd), which an engine's owner makes and the engine inherits.

They exist as long as a process has them open or mapped, so an engine's records survive its death.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator


def make_memory_file(name: str, size: int) -> int:
    """Return the descriptor of a new memory file of `size` zero bytes. name: shown in /proc/PID/fd."""
    first = os.memfd_create(name, os.MFD_CLOEXEC)
    # Above the standard streams: if those are closed, the first number would be one of the child's own.
    fd = fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(first)
    os.ftruncate(fd, size)
    return fd


def find_memory_files(pid: int, name: str) -> Iterator[int]:
    """Yield a descriptor, to read, of each memory file of this name that a process has open; it is closed afterwards.

    Nothing is found if this user may not inspect the process.
    """
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for number in numbers:
        path = f"/proc/{pid}/fd/{number}"
        with contextlib.suppress(OSError):
            if os.readlink(path).removeprefix("/memfd:").removesuffix(" (deleted)") != name:
                continue
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                yield fd
            finally:
                os.close(fd)
