"""The process that writes a dead engine's flight recorder to a file: `python -m core.capture.write_flight FD PID FORM`.

Started by frontend/engine/supervised_engine.py. FD: of the ring; PID: the dead engine's; FORM: of log lines. It has the
lowest priority, because the next engine starts at the same time.
"""

import os
import resource
import signal
import sys
import traceback
from typing import NoReturn

from core import log
from core.capture.flight_file import FlightWritten, write_flight
from ipc.errors import EngineCoreError
from ipc.records.flight_ring import read_ring

_NICE = 19
_CPU_S = 60  # CPU time limit
_LOG_S = 0.5  # for writing the last lines to standard error


class _TooLongError(Exception):
    """The work has used up its CPU time."""


def main(arguments: list[str]) -> int:
    """Write the file, report it on standard error, and return the exit code."""
    fd, pid = map(int, arguments[:2])
    log.use_format("json" if arguments[2] == "json" else "text")
    try:
        written = write_flight(read_ring(fd), pid)
    except (EngineCoreError, OSError) as error:
        log.say(f"engine-core: the flight recorder of engine process {pid} gives no file: {error}")
        return 1
    except _TooLongError:
        log.say(f"engine-core: the flight recorder of engine process {pid} was not written: it takes over {_CPU_S} s")
        return 1
    except Exception:  # a process entry
        log.say(f"engine-core: the flight recorder of engine process {pid} was not written:\n{traceback.format_exc()}")
        return 1
    if written is not None:
        log.say(f"engine-core: {describe(written, pid)}")
    return 0


def limit_process() -> None:
    """Give this process the lowest priority and a limit of _CPU_S seconds of CPU time, permanently."""
    os.nice(_NICE)
    signal.signal(signal.SIGXCPU, _give_up)
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _give_up(*_: object) -> NoReturn:
    raise _TooLongError


def describe(written: FlightWritten, pid: int) -> str:
    """Return a log line about a file that was written."""
    what = "without their content" if written.is_redacted else "with all prompts and answers"
    return (
        f"the last {written.num_steps} steps ({written.seconds:.1f} s) of engine process {pid} are in {written.path}, "
        f"{what}: engine-core replay {written.path}"
    )


if __name__ == "__main__":
    limit_process()
    code = main(sys.argv[1:])
    log.flush(_LOG_S)
    os._exit(code)  # skips interpreter teardown: all files are closed
