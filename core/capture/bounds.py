"""Limits on what an untrusted capture may cost: CPU time of one step, and memory of one run.

core/capture/restore.py refuses a state with wrong classes, types or lengths. A state may still be one that no engine
can reach. What it does then is arithmetic on its own columns, and ends here as an error: after too much time, with too
much memory, or with any exception.
"""

import contextlib
import os
import resource
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from ipc.errors import CaptureFileError, EngineCoreError

#: CPU time of one step, or of reading one checkpoint. A step of 4,096 rows takes a few milliseconds.
MOST_SECONDS = 60.0
#: Memory of one run in addition to what the process has, or half of the machine's if that is less.
MOST_BYTES = 8 << 30


class TooLongError(Exception):
    """Error: a step of a capture took more CPU time than any real engine's step."""


@contextlib.contextmanager
def untrusted_file(path: object) -> Iterator[None]:
    """Run something that a file determines: one step or one checkpoint. Time is limited only in the main thread.

    Errors: CaptureFileError for any failure that is not a bug of ours.
    """
    try:
        with _bounded_time():
            yield
    except EngineCoreError:
        raise
    except Exception as error:  # any type, because the file decides what runs
        raise CaptureFileError(f"{path}: no engine can have written it: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _bounded_time() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise TooLongError(f"it took more than {MOST_SECONDS:g} s of CPU time")


@contextlib.contextmanager
def bounded_memory(path: object) -> Iterator[None]:
    """Run a capture without a model: its options and its state decide how much memory that takes.

    Errors: CaptureFileError if it is more than the limit.
    """
    most = min(MOST_BYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    is_lower = soft != resource.RLIM_INFINITY and soft < now + most
    resource.setrlimit(resource.RLIMIT_AS, (soft if is_lower else now + most, hard))
    try:
        yield
    except MemoryError:
        raise CaptureFileError(f"{path}: its options or its state take more than {most} bytes of memory") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
