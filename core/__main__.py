"""The engine process: `python -P -m core LEASE_FD REPORT_FD`, started by frontend/engine/process.py with two pipes.

LEASE_FD brings Start, and later Drain; when it closes, the process ends. A standby receives Prepare before Start.
REPORT_FD takes StartPhase messages, then Ready or StartFailed.
"""

import gc

if __name__ == "__main__":
    gc.disable()  # until the modules are loaded: it would look through what stays, a seventh of the time

import contextlib
import errno
import faulthandler
import importlib.util
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

from core import log
from core.border.doorway import raise_descriptor_limit
from core.process.lease import Lease
from core.process.loop import EXIT_FAILED, run
from core.process.standby import dying_first, prepare_standby
from core.process.start import StartedEngine, bind, start_engine
from ipc.errors import EngineCoreError, EngineStartError, OutOfMemoryError
from ipc.wire.pipes import write_frame
from ipc.wire.start_messages import Prepared, Ready, StartFailed, StartPhase, StartReport

EXIT_START_FAILED = 2
_STORE_S = 5.0  # for writing the waiting KV blocks to files
_LOG_S = 0.5  # for writing the last lines to standard error
_PACKAGES = ("core", "ipc", "kernels")


def check_packages() -> None:
    """Check that Python imports our packages and not others of the same name (Hugging Face has a `kernels`, too).

    Errors: EngineStartError if it finds another package.
    """
    home = Path(__file__).resolve().parent.parent
    for name in (f"{__package__.removesuffix('core')}{name}" for name in _PACKAGES):
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin is not None else None
        # our __init__.py files are empty
        if origin is None or origin.parent.parent != home or origin.stat().st_size > 0:
            raise EngineStartError(
                f"the package {name!r} that Python finds ({origin or 'none'}) is not the engine's own, which is in "
                f"{home}: another distribution has a package of that name (Hugging Face's 'kernels', for one). "
                f"pip uninstall {name}, install the engine into its own environment, or install its wheel (pip install "
                f"{home}), which has everything inside the package engine_core"
            )


def seconds_since_start() -> float:
    """Return the seconds since this process was created, with a resolution of 10 ms."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), in ticks since boot
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)


def describe_failure(error: BaseException) -> StartFailed:
    """Return a one-line report for the owner. The traceback of an unexpected error goes to standard error."""
    if isinstance(error, EngineCoreError):
        return StartFailed(type(error).__name__, str(error))
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        detail = f" ({error})" if str(error) else ""
        return StartFailed(
            OutOfMemoryError.__name__,
            f"the engine ran out of memory while it started{detail}: lower kv_cache_memory_bytes, take a "
            "smaller model or raise the limit (ulimit -v, the container's)",
        )
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return StartFailed(
            EngineStartError.__name__,
            f"the engine cannot open more files while it starts ({error}): raise the limit (ulimit -n, here {limit})",
        )
    traceback.print_exception(error)
    last = traceback.format_exception_only(error)[-1].splitlines()[0]
    return StartFailed("", f"{last} (see its standard error)")


def main(arguments: list[str]) -> int:
    """Run the engine process until it ends; return its exit code. arguments: LEASE_FD REPORT_FD."""
    if len(arguments) != 2 or not all(argument.isdigit() for argument in arguments):
        print(f"usage: {__doc__}", file=sys.stderr)
        return EXIT_START_FAILED
    faulthandler.enable()
    raise_descriptor_limit()
    # the supervisor sends SIGUSR1 to a process that hangs, to get every thread's stack
    faulthandler.register(signal.SIGUSR1)
    lease_fd, report_fd = map(int, arguments)
    started = _start(lease_fd, report_fd)
    if started is None:
        return EXIT_START_FAILED
    return serve(started)


def serve(started: StartedEngine) -> int:
    """Serve until the end and return the exit code. Only a drained engine takes time to write its KV blocks."""
    code = EXIT_FAILED
    try:
        code = run(started.engine, started.io, started.executor.prepare_ahead, started.turn, rest=started.rest)
    finally:
        if started.store is not None:
            started.store.close(0.0 if code == EXIT_FAILED else _STORE_S)
        started.close_capture()
        started.scheduler.shutdown()
        started.executor.close()
    return code


def _start(lease_fd: int, report_fd: int) -> StartedEngine | None:
    """Start the engine and return it, or report why it did not start and return None.

    This is the one place that catches every exception.
    """

    def report(message: StartReport) -> None:
        with contextlib.suppress(BrokenPipeError):  # the owner is gone; the closed lease ends the process
            write_frame(report_fd, message)

    began = 0.0  # when the start began, in seconds since the process was created

    def begin(phase: str) -> None:
        report(StartPhase(phase, seconds_since_start() - began))

    try:
        lease, prepared = Lease(lease_fd), None
        log.use_format(lease.config.log_format)
        if lease.prepare is not None:
            check_packages()
            with dying_first():
                prepared = prepare_standby(lease.prepare, begin)
                report(Prepared(seconds_since_start()))
                lease.wait_start()
            began = seconds_since_start()
        start = lease.wait_start()
        begin("listen")
        check_packages()
        with lease.making_files:
            bound = bind(start)
            lease.on_exit(bound.router.remove_files)
        try:
            started = start_engine(start, bound, begin, prepared)
        except BaseException:
            bound.router.close(0)
            raise
        lease.on_exit(started.close_capture)
        started.io.start()
        lease.serve(started.io)
        report(Ready(bound.router.address, seconds_since_start() - began))
    except BaseException as error:
        report(describe_failure(error))
        return None
    os.close(report_fd)
    return started


if __name__ == "__main__":
    gc.freeze()  # nor does it look through the modules later
    gc.enable()
    code = main(sys.argv[1:])
    log.flush(_LOG_S)
    os._exit(code)  # skips interpreter teardown: threads may be in C code, and all files are closed
