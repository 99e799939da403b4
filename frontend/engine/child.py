"""Child: the operating system's side of a child process: spawn it, its pipes, its pidfd, its end.

A child is one of our packages, run by name with exec. It has two pipes: its lease, whose first frame says what to start
and whose end ends it, and one for its reports. ipc/wire/start_messages.py has the messages of the engine.
"""

import fcntl
import os
import select
import subprocess
import weakref
from collections.abc import Mapping, Sequence

import msgspec

from ipc.errors import EngineStartError
from ipc.machine.child_process import describe_exit, run_package
from ipc.machine.cpus import usable_cpus
from ipc.options.config import EngineConfig
from ipc.wire.pipes import write_frame
from ipc.wire.sockets import remove_private_address


class Child(msgspec.Struct, eq=False, weakref=True):
    """A spawned process and all that must be released for it.

    It has no reference to its owner (an EngineProcess), so that a finalizer can own it.
    """

    process: subprocess.Popen[bytes]
    pidfd: int  # readable once the process is dead; -1 once released, like the two below
    lease_fd: int  # write end
    report_fd: int  # read end
    owner: int  # process id, because a fork of the owner must not end the engine
    private_address: str | None = None  # created for this child, removed with it

    def describe_exit(self) -> str:
        """Return how the process ended, as text to follow "the process": "exited with code 1"."""
        return describe_exit(self.process.poll())

    def wait(self, timeout: float | None) -> bool:
        """Wait for the end of the process; return False if it has not ended within `timeout` seconds."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def send_start(self, start: msgspec.Struct) -> None:
        """Write a second start message to the lease pipe. Errors: EngineStartError if the process is gone."""
        try:
            _write_start(self.lease_fd, start)
        except BrokenPipeError:
            raise EngineStartError(f"the process {self.describe_exit()}") from None

    def close_lease(self) -> None:
        """Close the write end of the lease pipe, which ends the process."""
        self._close("lease_fd")

    def end(self, timeout: float) -> None:
        """Close the lease; kill the process after `timeout` seconds."""
        self.close_lease()
        if self.process.returncode is None:
            poller = select.poll()
            poller.register(self.pidfd, select.POLLIN)
            if not poller.poll(max(0.0, timeout) * 1000):
                self.process.kill()
        self.process.wait()

    def release(self, timeout: float) -> None:
        """End the process and free its resources. In a fork of the owner, only close the file descriptors."""
        if self.owner == os.getpid():
            if self.pidfd >= 0:
                self.end(timeout)
            if self.private_address is not None:
                remove_private_address(self.private_address)
        for name in ("lease_fd", "report_fd", "pidfd"):
            self._close(name)

    def _close(self, name: str) -> None:
        fd: int = getattr(self, name)
        if fd >= 0:
            setattr(self, name, -1)
            os.close(fd)


#: All children, to close their leases in a fork: an inherited lease left open would let a child outlive its owner.
_children: "weakref.WeakSet[Child]" = weakref.WeakSet()


def spawn(
    package: str,
    start: msgspec.Struct,
    *,
    arguments: Sequence[str] = (),
    pass_fds: Sequence[int] = (),
    defaults: Mapping[str, str] | None = None,
) -> Child:
    """Start `python -m package LEASE_FD REPORT_FD *arguments` and return at once.

    package: one of ours, by its name in a checkout, such as "core". start: the first frame of the lease pipe; the child
    reads it with ipc.wire.pipes.FrameReader and its own decoder. pass_fds: open descriptors that the child gets under
    the same numbers. defaults: environment variables that the user may override. Errors: EngineStartError.
    """
    lease_read, lease_write = _pipe()
    report_read, report_write = _pipe()
    try:
        _write_start(lease_write, start)
        words = str(lease_read), str(report_write), *arguments
        process = run_package(package, words, (lease_read, report_write, *pass_fds), defaults or {})
    except BaseException as error:
        os.close(lease_write)
        os.close(report_read)
        if isinstance(error, OSError):
            raise EngineStartError(f"the engine process could not be started: {error}") from error
        raise
    finally:
        os.close(lease_read)
        os.close(report_write)
    child = Child(process, os.pidfd_open(process.pid), lease_write, report_read, os.getpid())
    _children.add(child)
    return child


def engine_defaults(config: EngineConfig) -> dict[str, str]:
    """Return the environment variables of an engine, for spawn()."""
    threads = str(config.threads or usable_cpus())
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "GOMP_SPINCOUNT": "10000",  # endless spinning next to one more busy process: 83 ms instead of 21 (30 GEMMs)
        "THP_MEM_ALLOC_ENABLE": "1",  # huge pages: 33 GB/s read bandwidth instead of 21
        "TOKENIZERS_PARALLELISM": "false",
    }


def _pipe() -> tuple[int, int]:
    """Return (read end, write end) of a pipe, with numbers above the standard streams.

    If a standard stream is closed, a pipe would take its number, and the child's stream would overwrite the pipe.
    """
    low = os.pipe()
    try:
        return fcntl.fcntl(low[0], fcntl.F_DUPFD_CLOEXEC, 3), fcntl.fcntl(low[1], fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(low[0])
        os.close(low[1])


def _write_start(fd: int, start: msgspec.Struct) -> None:
    """Write the start message without blocking, because the pipe has no reader yet. Errors: EngineStartError."""
    os.set_blocking(fd, False)
    try:
        write_frame(fd, start)
    except BlockingIOError:
        raise EngineStartError("the engine's config and address are too long for a pipe: shorten them") from None
    os.set_blocking(fd, True)


def _close_leases_in_fork() -> None:
    for child in list(_children):
        child.close_lease()


os.register_at_fork(after_in_child=_close_leases_in_fork)
