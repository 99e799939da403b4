"""EngineProcess: start an engine in a process of its own, watch it and end it. This imports neither torch nor core.

The engine is started by name with exec, never by fork or multiprocessing, so the user's script needs no main guard. A
pipe is its lease on life: when this process ends, however it ends, the pipe closes and the engine exits.
"""

import contextlib
import os
import secrets
import select
import time
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType

import msgspec

from frontend.engine.child import Child, engine_defaults, spawn
from ipc import errors
from ipc.black_box import BlackBoxFile, BlackBoxReader
from ipc.config import EngineConfig
from ipc.errors import EngineCoreError, EngineStartError, MalformedMessageError
from ipc.files.model_files import locate_model
from ipc.pipes import FrameReader, decode_start_report, write_frame
from ipc.sockets import check_address, private_ipc_address, remove_private_address
from ipc.start_messages import Drain, Isolate, Ready, Start, StartFailed, StartPhase

OnPhase = Callable[[str, float], None]

_FAILED_START_S = 0.5  # for a process to end by itself after its start failed; it has no requests to lose

_ERRORS = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, EngineCoreError)
}
"""Errors an engine may name in StartFailed; other names become EngineStartError."""


class EngineProcess:
    """One engine process.

    config: the engine's. listen: address to listen on; None = a private ipc address, removed at the end. start_timeout:
    seconds from start() to readiness. on_phase: called by wait_ready() with the name of each phase of the start and the
    seconds since the process began. resume_s: seconds in which clients may expect another engine here after this one's
    death; 0 = there will be none. start() may be called again after close(); the epoch then counts up, and an address
    that was given stays the same.
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
        """Check the address; start nothing. Errors: AddressError."""
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
        self._phase = "start of Python"
        self._address: str | None = None
        self._exit = "has not been started"
        self._isolate = Isolate()
        self._box: BlackBoxFile | None = None  # of all processes, one after the other
        self._exit_code: int | None = None  # of the last process
        self.last_address = ""  # that the present process was told, or the last one had

    def start(self) -> None:
        """Spawn the process and return at once.

        A model with a Hugging Face name is found or downloaded first; afterwards `config` has its path. Errors:
        EngineStartError; AddressError; ModelFileError for such a name.
        """
        if self._child is not None:
            raise EngineStartError(f"engine process {self.pid} was started already; close() it first")
        self.config = _with_local_model(self.config)
        self.epoch += 1
        self._phase, self._address = "start of Python", None
        self._deadline = time.monotonic() + self._start_timeout
        private = private_ipc_address() if self._listen is None else None
        try:
            address = self._listen or private or ""
            self._box = self._box or BlackBoxFile(self.config.max_num_seqs)
            start = Start(
                self.config,
                address,
                self.epoch,
                self.owner_token,
                is_private=private is not None,
                isolate=self._isolate,
                black_box_fd=self._box.fd,
                resume_ms=self._resume_ms,
            )
            defaults = engine_defaults(self.config)
            self._child = spawn("core", start, pass_fds=[self._box.fd], defaults=defaults, private_address=private)
        except BaseException:
            if private is not None:
                remove_private_address(private)
            raise
        self.last_address = address
        self._finalizer = weakref.finalize(self, self._child.release, 0.5)

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
                        if self._on_phase is not None:
                            self._on_phase(name, seconds)
                    case Ready(address):
                        self._address = self.last_address = address
                        if self._listen is not None:
                            self._listen = address  # of the next process too: port 0 has become a number
                        return
                    case StartFailed(error, text):
                        self.wait(_FAILED_START_S)
                        raise self._start_error(error, text)
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
        """Return the process id. Errors: EngineStartError when there is no process."""
        return self._live().process.pid

    @property
    def pidfd(self) -> int:
        """Return a descriptor that is readable once the process is dead. This object owns it; poll it together with the
        socket.
        """
        return self._live().pidfd

    @property
    def exit_code(self) -> int | None:
        """Return the exit code of the last process; None while it lives. Negative: the signal that ended it."""
        return self._exit_code if self._child is None else self._child.process.poll()

    @property
    def black_box(self) -> BlackBoxReader:
        """Return the reader of what the present or the last process notes. Errors: EngineStartError."""
        if self._box is None:
            raise EngineStartError("an engine that has not been started has no black box")
        return self._box.reader

    def drop_black_box(self) -> None:
        """Free the memory of the black box, after close(); a later start() makes a new one."""
        self._box = None

    @property
    def is_public(self) -> bool:
        """Return whether the address was given, so that clients of others may know it."""
        return self._listen is not None

    def describe_exit(self) -> str:
        """Return a sentence part on how the process ended: "the engine process ..."."""
        if self._child is None:
            return f"the engine process {self._exit}"
        return f"the engine process ({self._child.process.pid}) {self._child.describe_exit()}"

    def isolate(self, which: Isolate) -> None:
        """Keep these requests from running, in this process and in those that are started later."""
        self._isolate, child = which, self._child
        if child is not None and child.lease_fd >= 0:
            with contextlib.suppress(BrokenPipeError):
                write_frame(child.lease_fd, which)

    def drain(self) -> None:
        """Let the engine take no more requests, finish the running ones and exit. This does not wait.

        A second call lets it report the end to its clients and exit at once, with code 143.
        """
        child = self._child
        if child is not None and child.lease_fd >= 0:
            with contextlib.suppress(BrokenPipeError):
                write_frame(child.lease_fd, Drain())

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the process has ended; return False when it has not within `timeout` seconds."""
        return self._child is None or self._child.wait(timeout)

    def stop(self, timeout: float = 5.0) -> None:
        """End the engine: close its lease, wait, and kill it after `timeout` seconds. Requests in flight are lost."""
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
        self.drop_black_box()

    def _live(self) -> Child:
        if self._child is None:
            raise EngineStartError(f"the engine process {self._exit}")
        return self._child

    def _reports(self) -> Iterator[StartPhase | Ready | StartFailed]:
        """Yield the child's reports until it ends or the time is up. Errors: EngineStartError."""
        child = self._live()
        reader = FrameReader()
        poller = select.poll()
        poller.register(child.report_fd, select.POLLIN)
        poller.register(child.pidfd, select.POLLIN)
        while True:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise EngineStartError(
                    f"the engine was not ready within start_timeout={self._start_timeout:g} seconds; it was in phase "
                    f"{self._phase!r}. Raise start_timeout if that phase needs longer"
                )
            ready = dict(poller.poll(left * 1000))
            if child.report_fd in ready:
                if data := os.read(child.report_fd, 65_536):
                    yield from self._decode(reader, data)
                    continue
                poller.unregister(child.report_fd)  # ended without Ready: the process is ending too
            if child.pidfd in ready:
                child.wait(None)
                raise EngineStartError(f"the engine process {child.describe_exit()} while in phase {self._phase!r}")

    def _decode(self, reader: FrameReader, data: bytes) -> Iterator[StartPhase | Ready | StartFailed]:
        try:
            for frame in reader.feed(data):
                yield decode_start_report(frame)
        except MalformedMessageError as error:
            raise EngineStartError(f"the started process does not speak as an engine does: {error}") from error

    def _start_error(self, name: str, text: str) -> EngineCoreError:
        if name in _ERRORS and _ERRORS[name] is not EngineStartError:
            return _ERRORS[name](text)
        return EngineStartError(f"the engine failed to start, in phase {self._phase!r}: {text}")


def _with_local_model(config: EngineConfig) -> EngineConfig:
    """Return the config with the path of a model that has a Hugging Face name.

    Both processes must read one snapshot, so this process alone chooses it.
    """
    path = locate_model(config.model, with_weights=config.load_format != "dummy")
    return msgspec.structs.replace(config, model=path)
