"""Processes for work of unknown cost: an untrusted program runs where it can be killed.

Such a process runs one of our packages as `python -P -m PACKAGE FD CPU_MS MEMORY`. FD is one end of a socket pair,
whose other end is its owner's. It answers one message at a time. Work that takes more than CPU_MS milliseconds of CPU
time, or MEMORY bytes, ends it. It also ends when the other end of its socket closes, and when its owner dies.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

from ipc.machine.channel import Channel
from ipc.machine.child_process import run_package

#: What such a process does not need: a thread for each core, with its memory, and address space reserved for threads.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_ARENA_MAX": "1",
}
#: With 19, work of a millisecond would wait a tenth of a second next to an engine that computes.
_NICE = 10
#: Seconds until an answer; if it takes longer, the process is stopped.
_MAX_ANSWER_S = 120.0
_PR_SET_PDEATHSIG = 1  # prctl(2)


class BoundedProcess:
    """A running process, seen from its owner."""

    def __init__(self, package: str, max_cpu_ms: int, max_memory_bytes: int) -> None:
        """Start it. Errors: OSError, EngineStartError."""
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        try:
            with theirs:
                words = [str(number) for number in (theirs.fileno(), max_cpu_ms, max_memory_bytes)]
                self.process = run_package(package, words, [theirs.fileno()], _ENVIRONMENT)
        except BaseException:
            self.channel.close()
            raise
        # Set before its interpreter starts, which takes as long as hundreds of small pieces of work.
        os.setpriority(os.PRIO_PROCESS, self.process.pid, min(19, os.getpriority(os.PRIO_PROCESS, 0) + _NICE))

    def ask(self, message: bytes) -> bytes:
        """Return the answer to a message. Errors: ChannelEndedError."""
        self.channel.send(message)
        poller = select.poll()
        poller.register(self.channel.socket, select.POLLIN)
        if not poller.poll(_MAX_ANSWER_S * 1000):
            self.kill()
        return self.channel.receive()

    def kill(self) -> None:
        """Kill it; the asking thread then gets a ChannelEndedError, and closes it."""
        self.process.kill()

    def end(self) -> int:
        """Kill it and free its resources; return its exit code, -N if signal N has ended it."""
        self.process.kill()
        self.channel.close()
        return self.process.wait()


def open_channel(fd: int) -> Channel:
    """Called in the process itself: return the channel to the owner. The process ends when the channel does."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to the process group: the owner decides
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # work that takes too much may end the process by SIGABRT
    channel = Channel(socket.socket(fileno=fd))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return channel


def limit_memory(max_bytes: int) -> None:
    """Limit this process to this much more memory than it has now."""
    used = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = used + max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


@contextlib.contextmanager
def limited_cpu_time(seconds: float) -> Iterator[None]:
    """Limit the CPU time of this process in the body; beyond it, SIGPROF ends the process."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
