"""HttpWorker: the HTTP server in a separate process, as seen by the process that started it."""

import contextlib
import os
import select
import signal
import socket
from collections.abc import Sequence

from frontend.engine.child import Child, spawn
from frontend.http.freed_memory import ALLOCATION
from frontend.http.process.options import BEGIN_DRAIN, READY, HttpOptions, WorkerStart
from ipc.errors import EngineStartError

START_S = 120.0  # a few seconds on a machine without much load
_END_S = 5.0  # time for the worker to write the ends of its answers


class HttpWorker:
    """One worker process on sockets that stay open here, so that no connection is refused while it restarts."""

    def __init__(self, connect: str, sockets: Sequence[socket.socket], options: HttpOptions) -> None:
        self._start = WorkerStart(connect, tuple(one.fileno() for one in sockets), options)
        self._child: Child | None = None
        self.exit_status: int | None = None  # of the last worker that has ended; below 0: by that signal

    @property
    def pid(self) -> int:
        """Return the process id of the running worker."""
        return self._running().process.pid

    @property
    def pidfd(self) -> int:
        """Return a descriptor that is readable once the worker has ended."""
        return self._running().pidfd

    @property
    def report_fd(self) -> int:
        """Return the descriptor that the worker writes to: READY or a reason, then TURNED once a second."""
        return self._running().report_fd

    def start(self) -> None:
        """Spawn the worker and wait until it serves. Errors: EngineStartError."""
        self.spawn()
        poller, said, reason = select.poll(), b"", ""
        poller.register(self.report_fd, select.POLLIN)
        while b"\n" not in said and not reason:
            if not poller.poll(START_S * 1000):
                reason = f"it reported nothing for {START_S:.0f} s"
            elif data := os.read(self.report_fd, 4096):
                said += data
            else:
                reason = "it ended"
        if not said.startswith(READY):
            self.stop()
            reason = said.decode(errors="replace").strip() or reason
            raise EngineStartError(f"the HTTP server did not start: {reason}")

    def spawn(self) -> None:
        """Spawn the worker and return at once. Errors: EngineStartError."""
        self._child = spawn("frontend.http", self._start, pass_fds=self._start.fds, defaults=ALLOCATION)

    def describe_exit(self) -> str:
        """Return how the worker ended, once its pidfd is readable, as text to follow "the HTTP server"."""
        self._running().wait(None)
        return self._running().describe_exit()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the worker; do nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def drain(self) -> None:
        """Let the worker accept no more requests and end after the last answer. Does not wait."""
        if self._child is not None and self._child.lease_fd >= 0:
            try:
                os.write(self._child.lease_fd, BEGIN_DRAIN)
            except BrokenPipeError:
                return

    def stop(self) -> None:
        """Stop the worker and wait for its end. A second call does nothing."""
        child, self._child = self._child, None
        if child is not None:
            child.release(_END_S)
            self.exit_status = child.process.returncode

    def _running(self) -> Child:
        assert self._child is not None, "the worker does not run"
        return self._child
