"""Standby: the process of a standby engine, from its start until it is taken or ended."""

import os
import select
import time
from collections.abc import Sequence

from frontend.engine.child import Child, engine_defaults, spawn
from ipc.errors import EngineStartError, MalformedMessageError
from ipc.options.config import EngineConfig
from ipc.records.flight_ring import FlightFile
from ipc.wire.pipes import FrameReader, decode_start_report
from ipc.wire.start_messages import Prepare, Prepared, Start, StartFailed


class Standby:
    """A process that prepares an engine and waits.

    config: the engine's, with a local model. fds: what the engine inherits: its black box and the like. flight: the
    flight recorder among them, if it has one. timeout: seconds in which it must be prepared. loads_model: whether it
    loads the model and creates the KV cache; otherwise it only imports its modules.
    """

    def __init__(
        self, config: EngineConfig, fds: Sequence[int], flight: FlightFile | None, timeout: float, *, loads_model: bool
    ) -> None:
        """Spawn the process and return at once. Errors: EngineStartError."""
        self.text = ""  # how it ended, as text to follow "the standby"
        self.is_prepared = False
        self.flight = flight
        self._deadline = time.monotonic() + timeout
        self._reader = FrameReader()
        self._child: Child | None = spawn(
            "core", Prepare(config, loads_model), pass_fds=fds, defaults=engine_defaults(config)
        )

    @property
    def fds(self) -> tuple[int, ...]:
        """Return the descriptors that become readable when look() has something to do."""
        if self._child is None:
            return ()
        return (self._child.pidfd,) if self.is_prepared else (self._child.pidfd, self._child.report_fd)

    @property
    def pid(self) -> int:
        """Return the process id. Errors: EngineStartError when there is no process."""
        if self._child is None:
            raise EngineStartError(f"the standby {self.text}")
        return self._child.process.pid

    def look(self, now: float) -> bool:
        """Read what the process has reported; return False once it is unusable: `text` says why. now: monotonic."""
        child = self._child
        if child is None:
            return False
        try:
            while not self.is_prepared and _is_readable(child.report_fd) and (data := os.read(child.report_fd, 65_536)):
                for frame in self._reader.feed(data):
                    match decode_start_report(frame):
                        case Prepared():
                            self.is_prepared = True
                        case StartFailed(_, text):
                            self.text = self.text or f"failed to prepare: {text}"
                        case _:
                            pass  # a phase of the preparation
        except MalformedMessageError as error:
            self.text = f"does not follow an engine's protocol: {error}"
        if not self.text and not self.is_prepared and now > self._deadline:
            self.text = "was not ready in time"
        if not self.text and _is_readable(child.pidfd):
            child.wait(None)
            self.text = child.describe_exit()
        if self.text:
            self.close()
        return not self.text

    def take(self, start: Start) -> Child:
        """Let the process start and return it; from now on the caller owns it.

        Errors: EngineStartError if it is gone.
        """
        child, self._child = self._child, None
        if child is None:
            raise EngineStartError(f"the standby {self.text}")
        self.text = "was taken"
        try:
            child.send_start(start)
        except BaseException:
            child.release(0.0)
            raise
        return child

    def close(self) -> None:
        """Kill the process at once: it has nothing to lose. A second call does nothing."""
        child, self._child = self._child, None
        if child is not None:
            self.text = self.text or "was closed"
            child.release(0.0)


def _is_readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))
