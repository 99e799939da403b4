"""The engine process's lease: the pipe from its owner, and the signals that end the process.

One thread watches both from the start, so that they work while the model loads and while a step hangs. If the pipe
ends, the owner is gone or has closed it: the process exits at once. The first Drain and the first SIGTERM let running
requests finish; a second one of the same kind ends them. The kinds are counted separately, because a service manager
sends SIGTERM both to this process and to the owner, which then sends Drain: together these count as one. SIGINT and
SIGHUP are ignored, because Ctrl-C in a terminal, and closing it, signal the whole process group, and the owner decides
what that means.
"""

import os
import select
import signal
import threading
from collections.abc import Callable

from core import log
from core.border.io_thread import IOThread
from ipc.options.config import EngineConfig
from ipc.wire.messages import EngineStopping
from ipc.wire.pipes import FrameReader, decode_owner_message
from ipc.wire.sockets import remove_private_address
from ipc.wire.start_messages import Drain, Isolate, Prepare, Start

EXIT_STOPPED = 128 + signal.SIGTERM  # stopped before the work was done
_STOP_S = 2.0  # without progress in reporting the end to the clients, or for making files
_LOG_S = 0.1  # for writing the last lines to standard error


class Lease:
    """The pipe from the owner, and the signals. Only the main thread may create it, because signal handlers need that.

    Errors: MalformedMessageError, EOFError.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._reader = FrameReader()
        self._signals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)  # works while the main thread is in C code
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})  # the owner blocks them for exec
        # held while files are created, so that an exit removes all or none of them
        self.making_files = threading.Lock()
        self._lock = threading.Lock()
        self._io: IOThread | None = None
        self._num_commands: dict[object, int] = {Drain: 0, signal.SIGTERM: 0}
        self._unread: list[bytes] = []  # frames that arrived together with the first one
        self._start: Start | None = None
        self._has_start = threading.Event()
        first = self._read_first()
        self.prepare: Prepare | None = first if isinstance(first, Prepare) else None  # the owner wants a standby
        if isinstance(first, Start):
            self._set_start(first)
        self.config: EngineConfig = first.config
        self._at_exit: list[Callable[[], None]] = [self._remove_private_directory]
        threading.Thread(target=self._watch, name="lease", daemon=True).start()

    def on_exit(self, do: Callable[[], None]) -> None:
        """Call `do` in the lease's thread before it ends the process. The first such call removes a private address."""
        self._at_exit.append(do)

    def wait_start(self) -> Start:
        """Return what to start. A standby waits here until it is needed."""
        self._has_start.wait()
        assert self._start is not None
        return self._start

    def _set_start(self, start: Start) -> None:
        self._start = start
        self._has_start.set()

    def _remove_private_directory(self) -> None:
        if self._start is not None and self._start.is_private:
            remove_private_address(self._start.address)

    def serve(self, io: IOThread) -> None:
        """Set the IO thread. From now on a drain lets its requests finish."""
        with self._lock:
            self._io = io

    def _read_first(self) -> Start | Prepare:
        while True:
            data = os.read(self._fd, 65_536)
            if not data:
                raise EOFError("the owner closed its pipe before it said what to start")
            if frames := self._reader.feed(data):
                self._unread = frames[1:]
                message = decode_owner_message(frames[0])
                assert isinstance(message, Start | Prepare), message
                return message

    def _watch(self) -> None:
        self._take(self._unread)
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        poller.register(self._signals, select.POLLIN)
        while True:
            for fd, _ in poller.poll():
                if fd == self._signals:
                    for number in os.read(self._signals, 64):
                        if number == signal.SIGTERM:
                            self._drain_or_stop(signal.SIGTERM)
                elif data := os.read(self._fd, 65_536):
                    self._take(self._reader.feed(data))
                else:
                    self._exit(0)

    def _take(self, frames: list[bytes]) -> None:
        for frame in frames:
            message = decode_owner_message(frame)
            if isinstance(message, Drain):
                self._drain_or_stop(Drain)
            elif isinstance(message, Start):
                self._set_start(message)
            elif isinstance(message, Isolate) and self._io is not None:
                self._io.isolate(message)

    def _drain_or_stop(self, kind: object) -> None:
        self._num_commands[kind] += 1
        if self._num_commands[kind] == 1:
            self._drain()
            return
        if self._io is not None:
            self._io.finish(EngineStopping("the engine was told to stop at once"), _STOP_S)
        self._exit(EXIT_STOPPED)

    def _drain(self) -> None:
        with self._lock:
            if self._io is None:
                self._exit(0)  # nothing has been accepted yet
            else:
                self._io.drain()

    def _exit(self, code: int) -> None:
        self.making_files.acquire(timeout=_STOP_S)  # never released
        for do in self._at_exit:
            do()
        log.flush(_LOG_S)
        os._exit(code)
