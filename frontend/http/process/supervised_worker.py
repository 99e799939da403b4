"""SupervisedWorker: an HTTP server in a process of its own that is started again when it dies or hangs."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Sequence

from frontend.http.life_signs import LifeSigns, effort_of
from frontend.http.process.options import READY, HttpOptions
from frontend.http.process.worker import START_S, HttpWorker
from frontend.http.wire.listen import close_http
from ipc.errors import EngineStartError

_LOOK_S = 0.5  # between two looks
_TURN_S = 5.0  # in which a worker that serves has said several times that its loop turns
_STACKS_S = 0.5  # for a worker that hangs to print its stacks
_RETRY_S = 1.0  # between two starts at least


class SupervisedWorker:
    """The worker of some sockets, and those that follow it; the sockets stay open meanwhile.

    start() starts the first one, whose failure is the caller's error. From watch() on an event loop sees to it that
    there is one, and never waits for it. options.hang_timeout: seconds beyond _TURN_S for which a worker may show no
    sign, of those in which this process ran itself; 0 = for ever. Signs are turns of its loop, and that it computes or
    waits for a core (frontend/http/life_signs.py). on_news: called with a line for each death.
    """

    def __init__(
        self, connect: str, sockets: Sequence[socket.socket], options: HttpOptions, on_news: Callable[[str], None]
    ) -> None:
        self.worker = HttpWorker(connect, sockets, options)
        self._sockets = sockets
        self._hang_s = options.hang_timeout
        self._tell = on_news
        self._is_ending = False
        self._is_ready = False  # the present worker serves
        self._said = b""  # by a worker that does not serve yet
        self._signs = self._new_signs()  # of the present worker
        self._looked_at = self._spawned_at = 0.0
        self._is_killed = False  # the present worker is being killed for its silence
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the first worker and wait until it serves. Errors: EngineStartError."""
        self.worker.start()
        self._is_ready = True

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start a worker again whenever one dies or hangs, until drain()."""
        self._loop = loop
        self._follow()

    def drain(self) -> None:
        """Let the worker take no more requests and end after the last answer; none follows it. Does not wait."""
        self._is_ending = True
        self.worker.drain()

    def stop(self) -> None:
        """End the worker, and wait for its end."""
        self._is_ending = True
        self.worker.stop()

    @property
    def has_cut(self) -> bool:
        """Return whether the end cut answers, after stop(): the worker says so, or it had to be killed."""
        return bool(self.worker.exit_status)

    def _follow(self) -> None:
        """Attend to the present worker."""
        self._signs, self._looked_at = self._new_signs(), self._loop.time()
        self._loop.add_reader(self.worker.report_fd, self._on_report)
        self._loop.add_reader(self.worker.pidfd, self._on_death)
        self._timer = self._loop.call_later(_LOOK_S, self._look)

    def _on_report(self) -> None:
        data = os.read(self.worker.report_fd, 65_536)
        self._signs.heard()
        if not data:  # its end, which the pidfd shows too
            self._loop.remove_reader(self.worker.report_fd)
        elif not self._is_ready:
            self._said += data
            self._is_ready = self._said.startswith(READY)

    def _look(self) -> None:
        now = self._loop.time()
        why = self._signs.look(min(now - self._looked_at, 2 * _LOOK_S), effort_of(self.worker.pid))
        self._looked_at = now
        self._timer = self._loop.call_later(_LOOK_S, self._look)
        if not self._is_ready and now - self._spawned_at > START_S:
            why = f"it has not started in {START_S:.0f} s"
        if why and not (self._is_ending or self._is_killed):
            self._tell(f"the HTTP server ({self.worker.pid}) hangs: {why}")
            self._is_killed = True
            if self._is_ready:  # it prints the stacks of its threads; before it is ready the signal would be its end
                self.worker.send(signal.SIGUSR1)
            self._loop.call_later(_STACKS_S, self._kill, self.worker.pid)

    def _new_signs(self) -> LifeSigns:
        return LifeSigns(_TURN_S + self._hang_s if self._hang_s else 0.0)

    def _kill(self, pid: int) -> None:
        if self._is_killed and not self._is_ending and self.worker.pid == pid:
            self.worker.send(signal.SIGKILL)

    def _on_death(self) -> None:
        self._forget()
        if self._is_ending:
            for one in self._sockets:  # nobody accepts there any more
                close_http(one)
            return
        how = self.worker.describe_exit()
        if not self._is_ready:
            how = f"did not start: {self._said.decode(errors='replace').strip() or how}"
        self.worker.stop()
        self._tell(f"the HTTP server {how}; it is started again")
        self._is_ready, self._is_killed, self._said = False, False, b""
        self._loop.call_later(max(0.0, self._spawned_at + _RETRY_S - self._loop.time()), self._spawn)

    def _forget(self) -> None:
        """Attend to the present worker no longer."""
        self._loop.remove_reader(self.worker.pidfd)
        self._loop.remove_reader(self.worker.report_fd)
        if self._timer is not None:
            self._timer.cancel()

    def _spawn(self) -> None:
        if self._is_ending:
            return
        self._spawned_at = self._loop.time()
        try:
            self.worker.spawn()
        except EngineStartError as error:  # such as a lack of processes or descriptors
            self._tell(f"the HTTP server did not start: {error}; it is tried again")
            self._loop.call_later(_RETRY_S, self._spawn)
        else:
            self._follow()
