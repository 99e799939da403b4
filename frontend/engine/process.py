"""EngineProcess: start an engine in a separate process, watch it and stop it. This imports neither torch nor core.

The engine is started by name with exec, never by fork or multiprocessing, so the user's script needs no main guard. A
pipe is its lease: when this process ends, however it ends, the pipe closes and the engine exits.
"""

import contextlib
import os
import secrets
import select
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from frontend.engine.child import Child, engine_defaults, spawn
from frontend.engine.standby import Standby
from ipc import errors
from ipc.errors import EngineCoreError, EngineStartError, MalformedMessageError
from ipc.files.model_files import locate_model
from ipc.options.config import EngineConfig
from ipc.options.step_sizes import most_rows
from ipc.records.black_box import BlackBoxFile, BlackBoxReader
from ipc.records.flight_ring import FlightFile
from ipc.wire.pipes import FrameReader, decode_start_report, write_frame
from ipc.wire.sockets import check_address, private_ipc_address, remove_private_address
from ipc.wire.start_messages import Drain, Isolate, Prepared, Ready, Start, StartFailed, StartPhase, StartReport

if TYPE_CHECKING:
    from frontend.engine.ray_workers import RayWorkers

OnPhase = Callable[[str, float], None]

_ANSWER_S = 2.0  # time for a standby to begin its start: a stopped one never does
_FAILED_START_S = 0.5  # time for a process to end by itself after its start failed; it has no requests to lose

_ERRORS = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, EngineCoreError)
}
"""Errors that an engine may name in StartFailed; other names become EngineStartError."""


class EngineProcess:
    """One engine process.

    config: the engine's. listen: address to listen at; None = a private ipc address, removed at the end. start_timeout:
    seconds from start() to readiness. on_phase: called by wait_ready() with the name of each phase of the start and the
    seconds since the process began. resume_s: seconds in which clients may expect another engine here after this one's
    death; 0 = there will be none. start() may be called again after close(); the epoch is then incremented, and a given
    address stays the same.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        listen: str | None = None,
        start_timeout: float = 300.0,
        on_phase: OnPhase | None = None,
        resume_s: float = 0.0,
    ) -> None:
        """Check the address without starting anything. Errors: AddressError."""
        if listen is not None:
            check_address(listen, binding=True)
        self.config = config
        self.owner_token = secrets.token_bytes(16)  # a client that sends it may pause, drain and shut down
        self.epoch = -1  # of the running engine; 0 for the first start
        self._listen = listen
        self._start_timeout = start_timeout
        self._on_phase = on_phase
        self._resume_ms = int(resume_s * 1000)
        self._child: Child | None = None
        self._finalizer: weakref.finalize[[float], EngineProcess] | None = None
        self._deadline = 0.0
        self._has_begun = True  # true of a spawned process; of a standby once it reports a phase
        self._phase = "start of Python"
        self._address: str | None = None
        self._exit = "has not been started"
        self._isolate = Isolate()
        self._box: BlackBoxFile | None = None  # of all processes, one after the other
        self._flight: FlightFile | None = None  # of the present process, or the last one
        self.ray_workers: RayWorkers | None = None  # of all processes too
        self._adapters_fd = -1  # the same: a memory file with the names of adapters
        self._exit_code: int | None = None  # of the last process
        self.last_address = ""  # that the present process got, or the last one had

    def start(self, standby: Standby | None = None) -> None:
        """Spawn the process, or let a standby of prepare_next() become it, and return at once.

        A model with a Hugging Face name is found or downloaded first; afterwards `config` has its path. A standby has a
        short time to begin, then as long as any process. Errors: EngineStartError; AddressError; ModelFileError for
        such a name.
        """
        if self._child is not None:
            raise EngineStartError(f"engine process {self.pid} was already started; close() it first")
        self.config = _with_local_model(self.config)
        self._place_workers()
        self.epoch += 1
        self._phase, self._address = "start of Python", None
        self._has_begun = standby is None
        self._deadline = time.monotonic() + (self._start_timeout if self._has_begun else _ANSWER_S)
        private = private_ipc_address() if self._listen is None else None
        try:
            address = self._listen or private or ""
            self._box = self._box or BlackBoxFile(most_rows(self.config))
            self._flight = _flight_file(self.config) if standby is None else standby.flight
            if self.config.enable_lora and self._adapters_fd < 0:
                self._adapters_fd = os.memfd_create("engine-core-adapters", os.MFD_CLOEXEC)
                weakref.finalize(self, os.close, self._adapters_fd)
            start = Start(
                self.config,
                address,
                self.epoch,
                self.owner_token,
                is_private=private is not None,
                isolate=self._isolate,
                black_box_fd=self._box.fd,
                adapters_fd=self._adapters_fd,
                resume_ms=self._resume_ms,
                flight_fd=self._flight.fd if self._flight else -1,
            )
            if standby is None:
                defaults = engine_defaults(self.config)
                self._child = spawn("core", start, pass_fds=self._fds(self._flight), defaults=defaults)
            else:
                self._child = standby.take(start)
            self._child.private_address = private
        except BaseException:
            if private is not None:
                remove_private_address(private)
            raise
        self.last_address = address
        self._finalizer = weakref.finalize(self, self._child.release, 0.5)

    def _place_workers(self) -> None:
        """Let Ray place the workers of all processes, before the first one. Errors: ConfigError, EngineStartError."""
        if self.config.distributed_executor_backend != "ray" or self.ray_workers is not None:
            return
        from frontend.engine.ray_workers import RayWorkers  # needed with Ray only

        self.ray_workers = RayWorkers(self.config, self._start_timeout)
        weakref.finalize(self, self.ray_workers.close).atexit = False  # at a program's end Ray ends them itself
        self.config = self.ray_workers.config

    def prepare_next(self, *, loads_model: bool) -> Standby:
        """Return a process that prepares to become the next one, after start(). Errors: EngineStartError."""
        flight = _flight_file(self.config)
        return Standby(self.config, self._fds(flight), flight, self._start_timeout, loads_model=loads_model)

    def _fds(self, flight: FlightFile | None) -> list[int]:
        """Return the descriptors that a process inherits."""
        assert self._box is not None, "before the first start"
        return [
            self._box.fd,
            *([flight.fd] if flight else []),
            *([self._adapters_fd] if self._adapters_fd >= 0 else []),
        ]

    def wait_ready(self) -> None:
        """Wait until the engine answers on `address`.

        Errors: EngineStartError with the phase and the reason; or the engine's own ConfigError, ModelFileError,
        OutOfMemoryError, AddressError. After an error the process has ended.
        """
        if self._address is not None:
            return
        try:
            for message in self._reports():
                match message:
                    case StartPhase(name, seconds):
                        self._phase = name
                        if not self._has_begun:
                            self._has_begun = True
                            self._deadline = time.monotonic() + self._start_timeout
                        if self._on_phase is not None:
                            self._on_phase(name, seconds)
                    case Ready(address):
                        self._address = self.last_address = address
                        if self._listen is not None:
                            self._listen = address  # also for the next process: port 0 has become a number
                        return
                    case StartFailed(error, text):
                        self.wait(_FAILED_START_S)
                        raise self._start_error(error, text)
                    case Prepared():
                        pass  # of a standby, which this process was
        except BaseException:
            self.stop(_FAILED_START_S)
            self.close()
            raise

    @property
    def address(self) -> str:
        """Return the address that the engine listens on; known after wait_ready(). Errors: EngineStartError."""
        if self._address is None:
            raise EngineStartError("the engine has no address before wait_ready()")
        return self._address

    @property
    def pid(self) -> int:
        """Return the process id. Errors: EngineStartError if there is no process."""
        return self._live().process.pid

    @property
    def pidfd(self) -> int:
        """Return a descriptor that is readable once the process is dead. This object owns it; poll it together with the
        socket.
        """
        return self._live().pidfd

    @property
    def exit_code(self) -> int | None:
        """Return the exit code of the last process; None while it runs. Negative: the signal that ended it."""
        return self._exit_code if self._child is None else self._child.process.poll()

    @property
    def black_box(self) -> BlackBoxReader:
        """Return the reader of the black box of the present or last process. Errors: EngineStartError."""
        if self._box is None:
            raise EngineStartError("an engine that has not been started has no black box")
        return self._box.reader

    def release(self) -> None:
        """Free what is of all processes, after close(): black box, flight recorder and Ray's actors.

        A later start() makes new ones.
        """
        self._box = self._flight = None
        placed, self.ray_workers = self.ray_workers, None
        if placed is not None:
            self.config = msgspec.structs.replace(self.config, master_addr=placed.given_address)
            placed.close()

    def take_flight(self) -> FlightFile | None:
        """Return the flight recorder of the present or last process, once; None: it has none."""
        flight, self._flight = self._flight, None
        return flight

    @property
    def is_public(self) -> bool:
        """Return whether the address was given, so that clients in other processes may know it."""
        return self._listen is not None

    def describe_exit(self) -> str:
        """Return how the process ended, as a part of a sentence: "the engine process ..."."""
        if self._child is None:
            return f"the engine process {self._exit}"
        return f"the engine process ({self._child.process.pid}) {self._child.describe_exit()}"

    def isolate(self, which: Isolate) -> None:
        """Keep these requests from running, in this process and in those that are started later."""
        self._isolate, child = which, self._child
        if child is not None and child.lease_fd >= 0:
            with contextlib.suppress(BrokenPipeError):
                write_frame(child.lease_fd, which)

    def drain(self) -> bool:
        """Let the engine accept no more requests, finish the running ones and exit. This does not wait.

        A second call lets it report the end to its clients and exit at once, with code 143. Return whether there was a
        process.
        """
        child = self._child
        if child is None or child.lease_fd < 0:
            return False
        with contextlib.suppress(BrokenPipeError):
            write_frame(child.lease_fd, Drain())
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the process has ended; return False if it has not within `timeout` seconds."""
        return self._child is None or self._child.wait(timeout)

    def stop(self, timeout: float = 5.0) -> None:
        """Stop the engine: close its lease, wait, and kill it after `timeout` seconds. Requests in flight are lost."""
        if self._child is not None:
            self._child.end(timeout)

    def close(self) -> None:
        """Call stop(), then release everything. Further calls do nothing."""
        child, self._child = self._child, None
        if child is None:
            return
        child.release(5.0)
        if self._finalizer is not None:
            self._finalizer.detach()
        self._exit, self._exit_code = f"({child.process.pid}) {child.describe_exit()}", child.process.returncode

    def __enter__(self) -> "EngineProcess":
        if self._child is None:
            self.start()
        self.wait_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self.release()

    def _live(self) -> Child:
        if self._child is None:
            raise EngineStartError(f"the engine process {self._exit}")
        return self._child

    def _reports(self) -> Iterator[StartReport]:
        """Yield the child's reports until it ends or the time is up. Errors: EngineStartError."""
        child = self._live()
        reader = FrameReader()
        poller = select.poll()
        poller.register(child.report_fd, select.POLLIN)
        poller.register(child.pidfd, select.POLLIN)
        stopped = StoppedProcess(child.process.pid)
        while True:
            left = self._deadline - time.monotonic()
            if left <= 0:
                if not self._has_begun:
                    raise EngineStartError(f"the standby did not begin its start within {_ANSWER_S:g} s")
                raise EngineStartError(
                    f"the engine was not ready within start_timeout={self._start_timeout:g} seconds; it was in phase "
                    f"{self._phase!r}. Raise start_timeout if that phase needs longer"
                )
            if stopped.look(time.monotonic()):
                raise EngineStartError(
                    f"the engine process ({child.process.pid}) was stopped by a signal in phase {self._phase!r} for "
                    f"{LIMIT_S:g} s; it was killed"
                )
            ready = dict(poller.poll(min(left, LOOK_S) * 1000))
            if child.report_fd in ready:
                if data := os.read(child.report_fd, 65_536):
                    yield from self._decode(reader, data)
                    continue
                poller.unregister(child.report_fd)  # ended without Ready: the process is also ending
            if child.pidfd in ready:
                child.wait(None)
                raise EngineStartError(f"the engine process {child.describe_exit()} while in phase {self._phase!r}")

    def _decode(self, reader: FrameReader, data: bytes) -> Iterator[StartReport]:
        try:
            for frame in reader.feed(data):
                yield decode_start_report(frame)
        except MalformedMessageError as error:
            raise EngineStartError(f"the started process does not follow an engine's protocol: {error}") from error

    def _start_error(self, name: str, text: str) -> EngineCoreError:
        if name in _ERRORS and _ERRORS[name] is not EngineStartError:
            return _ERRORS[name](text)
        return EngineStartError(f"the engine failed to start, in phase {self._phase!r}: {text}")


def _flight_file(config: EngineConfig) -> FlightFile | None:
    """Return a new flight recorder. An engine with a capture needs none: its file has more."""
    is_wanted = config.capture is None and config.flight_recorder_bytes
    return FlightFile(config.flight_recorder_bytes) if is_wanted else None


def _with_local_model(config: EngineConfig) -> EngineConfig:
    """Return the config with the path of a model that has a Hugging Face name.

    Both processes must read the same snapshot, so this process alone chooses it.
    """
    path = locate_model(config.model, with_weights=config.load_format != "dummy")
    return msgspec.structs.replace(config, model=path)


# StoppedProcess: whether a starting process is stopped by a signal, so that it would never report.


LIMIT_S = 5.0  # as long as a running engine may show no sign of life
LOOK_S = 1.0  # between samples


class StoppedProcess:
    """The time for which a process is stopped (SIGSTOP, SIGTSTP). A debugger's stops are not counted.

    Only time in which this process ran is counted: Ctrl-Z stops both, and then nothing is killed.
    """

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self._looked_at: float | None = None
        self._stopped_s = 0.0

    def look(self, now: float) -> bool:
        """Return whether it has been stopped for too long. now: monotonic seconds."""
        since, self._looked_at = 0.0 if self._looked_at is None else min(now - self._looked_at, 2 * LOOK_S), now
        try:
            is_stopped = self._stat.read_text().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False
        self._stopped_s = self._stopped_s + since if is_stopped else 0.0
        return self._stopped_s > LIMIT_S
