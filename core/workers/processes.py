"""The processes of workers as seen by their owner: children of this process, or on other machines."""

import os
import signal
import socket
from collections.abc import Callable
from typing import Protocol

from core.workers.messages import Load, encode_message
from core.workers.wires import Place, Wires, above
from ipc.machine.channel import Channel
from ipc.machine.child_process import describe_exit, run_package
from ipc.options.config import EngineConfig


class WorkerProcess(Protocol):
    """One worker's process."""

    @property
    def pid(self) -> int:
        """Return its process id on its machine."""

    @property
    def ended_fd(self) -> int:
        """Return a descriptor that becomes readable when the process is dead."""

    @property
    def end(self) -> str | None:
        """Return how it ended, to follow "worker 0"; None: it is alive."""

    def signal(self, number: int) -> None:
        """Send it a signal."""

    def kill(self) -> None:
        """Kill it. If it is a child, wait for its end."""

    def close(self) -> None:
        """Release this object's resources. The process is dead, or will be."""


class ChildProcess:
    """A worker that is a child of this process. It dies with the thread that created it."""

    def __init__(self, config: EngineConfig, place: Place, wires: Wires) -> None:
        """Start it, and make it load the model. wires: passed to the process, and closed here.

        Errors: OSError, EngineStartError.
        """
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        with theirs:
            fd = above(theirs.fileno())
        try:
            self._process = run_package("core.workers", [str(fd)], [fd, *wires.descriptors], {})
        except BaseException:
            self.channel.close()
            raise
        finally:
            os.close(fd)
            wires.close()
        self._pidfd = os.pidfd_open(self._process.pid)
        self.channel.send(encode_message(Load(config, place, wires)))

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self._process.pid

    @property
    def ended_fd(self) -> int:
        """Return its pidfd."""
        return self._pidfd

    @property
    def end(self) -> str | None:
        """Return how it ended; None: it is alive."""
        code = self._process.poll()
        return None if code is None else f"({self.pid}) {describe_exit(code)}"

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it and wait for its end."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close the pidfd. The channel belongs to its reader."""
        os.close(self._pidfd)


class RemoteProcess:
    """A worker on another machine. The thread that hears from that machine reports what happens to it.

    send: sends it a signal. host: the machine's name, for humans.
    """

    def __init__(self, host: str, send: Callable[[int], None]) -> None:
        self.pid = 0  # 0 until it is known
        self.end: str | None = None
        self._host, self._send = host, send
        self._ended = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_closed = False

    @property
    def ended_fd(self) -> int:
        """Return an eventfd."""
        return self._ended

    def tell_end(self, text: str) -> None:
        """Record that it has ended, and how."""
        if self.end is None:
            self.end = f"({self.pid} at {self._host}) {text}"
            if not self._is_closed:
                os.eventfd_write(self._ended, 1)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._send(number)

    def kill(self) -> None:
        """Kill it as soon as its machine gets the message."""
        if self.end is None:
            self._send(signal.SIGKILL)

    def close(self) -> None:
        """Close the eventfd."""
        self._is_closed = True
        os.close(self._ended)
