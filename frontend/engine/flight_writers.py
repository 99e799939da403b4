"""FlightWriters: the processes that write the flight recorders of dead engines to files, while the next engine runs."""

import contextlib
import subprocess
import sys
import threading
import time

from frontend.engine.death import Cause
from ipc.log_lines import LogFormat
from ipc.machine.child_process import HOME_PACKAGE, child_environment, inherited_stream
from ipc.records.flight_ring import FlightFile

#: Deaths whose flight recorders are written.
WRITTEN = (Cause.FAILED, Cause.CRASHED, Cause.OUT_OF_MEMORY, Cause.HUNG, Cause.KILLED)
_MOST = 3  # at the same time; if an engine dies faster than they write, further deaths add nothing
_CLOSE_S = 2.0  # for the last ones to end


class FlightWriters:
    """The writers of one owner."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[bytes]] = []

    def take(self, flight: FlightFile | None, pid: int, cause: Cause, log_format: LogFormat) -> None:
        """Have a dead engine's flight recorder written, if its cause of death requires it. pid: the engine's;
        log_format: of its log lines. This does not wait.
        """
        self._running = [one for one in self._running if one.poll() is None]
        if flight is None or cause not in WRITTEN or len(self._running) >= _MOST or not sys.executable:
            return
        with contextlib.suppress(OSError):  # no memory or no processes: the next engine matters more
            self._running.append(
                subprocess.Popen(
                    [
                        *(sys.executable, "-P", "-m", f"{HOME_PACKAGE}core.capture.write_flight"),
                        *(str(flight.fd), str(pid), log_format),
                    ],
                    pass_fds=[flight.fd],
                    stdin=subprocess.DEVNULL,
                    env=child_environment({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}),
                    start_new_session=True,  # Ctrl-C at a terminal is meant for the engine
                    stdout=inherited_stream(1),
                    stderr=inherited_stream(2),
                )
            )

    def close(self) -> None:
        """Wait for the writers; those that take longer continue without this process."""
        end = time.monotonic() + _CLOSE_S
        for one in self._running:
            try:
                one.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                threading.Thread(target=one.wait, daemon=True).start()
        self._running = []
