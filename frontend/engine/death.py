"""Death: how an engine process ended, and the kind of cause."""

import signal
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from ipc.machine.control_groups import control_groups
from ipc.wire.start_messages import EXIT_RESTART

_VMSTAT = Path("/proc/vmstat")

#: Exit codes of core/process/lease.py, core/process/loop.py and core/__main__.py.
_EXIT_OK = 0
_EXIT_START_FAILED = 2
_EXIT_STOPPED = 128 + signal.SIGTERM

_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS, signal.SIGTRAP}


class Cause(Enum):
    """The kind of a death."""

    ENDED = "it ended as requested"  # drained, shut down or stopped: no restart
    RESTART = "it ended for the next one"  # an upgrade
    START_FAILED = "it did not start"
    FAILED = "a step failed"  # an exception
    CRASHED = "it crashed"  # a signal that the process itself caused
    OUT_OF_MEMORY = "the system had no more memory"  # the kernel killed it
    HUNG = "a step hung"  # the supervisor killed it
    KILLED = "it was killed from outside"


class Death(NamedTuple):
    """The end of one engine process. text: for people, to follow "the engine process"."""

    cause: Cause
    text: str


def classify(
    exit_code: int | None, text: str, *, was_ready: bool, was_hung: bool = False, num_oom_kills: int = 0
) -> Death:
    """Return the death of a process.

    exit_code: None = it never ran; negative = the signal. was_ready: its start had succeeded. was_hung: the supervisor
    killed it. num_oom_kills: processes that the kernel killed for lack of memory in that time.
    """
    return Death(_cause(exit_code, was_ready, was_hung, num_oom_kills), text)


def _cause(exit_code: int | None, was_ready: bool, was_hung: bool, num_oom_kills: int) -> Cause:
    if was_hung:
        return Cause.HUNG
    if exit_code == -signal.SIGKILL:
        return Cause.OUT_OF_MEMORY if num_oom_kills else Cause.KILLED
    if exit_code is not None and -exit_code in _CRASHES:
        return Cause.CRASHED
    if exit_code is not None and exit_code < 0:
        return Cause.KILLED
    if exit_code == EXIT_RESTART:
        return Cause.RESTART
    if exit_code == _EXIT_START_FAILED or not was_ready:
        return Cause.START_FAILED
    return Cause.ENDED if exit_code in (_EXIT_OK, _EXIT_STOPPED) else Cause.FAILED


def count_oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory: in this control group, or on this machine."""
    events = [folder / "memory.events" for folder, is_version_2 in control_groups("memory") if is_version_2]
    for path in (*events, _VMSTAT):
        try:
            words = path.read_text().split()
        except OSError:
            continue
        if "oom_kill" in words:
            return int(words[words.index("oom_kill") + 1])
    return 0
