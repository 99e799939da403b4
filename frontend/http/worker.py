"""HttpWorker: the HTTP server in a process of its own, seen from the process that started it."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from frontend.engine.child import child_environment
from frontend.http.options import HttpOptions, WorkerStart
from ipc.errors import EngineStartError

_PACKAGE = __name__.removesuffix(".worker")
_END_S = 5.0  # for the worker to write the ends of its answers


class HttpWorker:
    """One worker process on sockets that stay open here, so that no connection is refused while it starts again."""

    def __init__(self, connect: str, sockets: Sequence[socket.socket], options: HttpOptions) -> None:
        self._start = WorkerStart(connect, tuple(one.fileno() for one in sockets), options)
        self._process: subprocess.Popen[bytes] | None = None
        self.pidfd = -1  # readable once the worker has ended

    def start(self) -> None:
        """Spawn the worker and wait until it serves. Errors: EngineStartError."""
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _PACKAGE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=self._start.fds,
            env=child_environment(),
        )
        self._process, self.pidfd = process, os.pidfd_open(process.pid)
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(self._start) + b"\n")
            process.stdin.flush()
        said = process.stdout.readline().decode(errors="replace").strip()
        if said != "ready":
            self.stop()
            raise EngineStartError(f"the HTTP server did not start: {said.removeprefix('failed ') or 'it ended'}")

    @property
    def pid(self) -> int:
        """Return the process id of the running worker."""
        assert self._process is not None, "the worker does not run"
        return self._process.pid

    def drain(self) -> None:
        """Let the worker take no more requests and end after the last answer. Does not wait."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ValueError):
                self._process.stdin.write(b"drain\n")
                self._process.stdin.flush()

    def stop(self) -> None:
        """End the worker and wait for its end. A second call does nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        os.close(self.pidfd)
        self.pidfd = -1
