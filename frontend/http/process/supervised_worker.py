"""SupervisedWorker: an HTTP server in a separate process that is restarted when it dies or hangs."""

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

_LOOK_S = 0.5  # between two checks
_TURN_S = 5.0  # time in which a serving worker has reported several turns of its loop
_STACKS_S = 0.5  # time for a hung worker to print its stacks
_RETRY_S = 1.0  # least time between two starts


class SupervisedWorker:
    """The worker of some sockets, and its successors; the sockets stay open across them.

    start() starts the first one, whose failure is the caller's error. After watch(), an event loop ensures that there
    is one, and never waits for it. options.hang_timeout: seconds beyond _TURN_S for which a worker may show no sign,
    counting only time in which this process ran; 0 = forever. Signs are turns of its loop, and that it computes or
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
        self.has_ended = False  # after drain(), without a successor
        self._is_ready = False  # the present worker serves
        self._said = b""  # by a worker that does not serve yet
        self._signs = self._new_signs()  # of the present worker
        self._looked_at = self._spawned_at = 0.0
        self._is_killed = False  # the present worker is being killed because it hangs
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the first worker and wait until it serves. Errors: EngineStartError."""
        self.worker.start()
        self._is_ready = True

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Restart the worker whenever it dies or hangs, until drain()."""
        self._loop = loop
        self._follow()

    def drain(self) -> None:
        """Let the worker accept no more requests and end after the last answer, without a successor. Does not wait."""
        self._is_ending = True
        self.worker.drain()

    def stop(self) -> None:
        """Stop the worker, and wait for its end."""
        self._is_ending = True
        self.worker.stop()

    @property
    def has_cut(self) -> bool:
        """After stop(), return whether that cut answers: the worker said so, or it had to be killed."""
        return bool(self.worker.exit_status)

    def _follow(self) -> None:
        """Handle events of the present worker."""
        self._signs, self._looked_at = self._new_signs(), self._loop.time()
        self._loop.add_reader(self.worker.report_fd, self._on_report)
        self._loop.add_reader(self.worker.pidfd, self._on_death)
        self._timer = self._loop.call_later(_LOOK_S, self._look)

    def _on_report(self) -> None:
        data = os.read(self.worker.report_fd, 65_536)
        self._signs.heard()
        if not data:  # its end, which the pidfd also shows
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
            if self._is_ready:  # it prints its threads' stacks; before it is ready the signal would kill it
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
            self._end()
            return
        how = self.worker.describe_exit()
        if not self._is_ready:
            how = f"did not start: {self._said.decode(errors='replace').strip() or how}"
        self.worker.stop()
        self._tell(f"the HTTP server {how}; it is restarted")
        self._is_ready, self._is_killed, self._said = False, False, b""
        self._loop.call_later(max(0.0, self._spawned_at + _RETRY_S - self._loop.time()), self._spawn)

    def _end(self) -> None:
        self.has_ended = True
        for one in self._sockets:  # no process accepts there any more
            close_http(one)

    def _forget(self) -> None:
        """Stop handling events of the present worker."""
        self._loop.remove_reader(self.worker.pidfd)
        self._loop.remove_reader(self.worker.report_fd)
        if self._timer is not None:
            self._timer.cancel()

    def _spawn(self) -> None:
        if self._is_ending:  # a drain found no worker
            self._end()
            return
        self._spawned_at = self._loop.time()
        try:
            self.worker.spawn()
        except EngineStartError as error:  # such as a lack of processes or descriptors
            self._tell(f"the HTTP server did not start: {error}; the start is tried again")
            self._loop.call_later(_RETRY_S, self._spawn)
        else:
            self._follow()
