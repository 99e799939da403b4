"""SupervisedEngine: an engine process that is started again when it dies. A thread watches it; Supervisor decides."""

import os
import select
import signal
import threading
import time
from collections.abc import Callable

from frontend.engine.death import Cause, Death, classify, count_oom_kills
from frontend.engine.last_words import say_last_words
from frontend.engine.process import EngineProcess
from frontend.engine.restart_policy import RestartRules
from frontend.engine.signs import DEFAULT_HANG_S
from frontend.engine.supervisor import State, Supervisor
from frontend.engine.watchdog import Watchdog
from ipc.black_box import Suspect
from ipc.errors import EngineCoreError

_TICK_S = 0.5  # between two looks at a running engine
_STACKS_S = 0.5  # for a process that hangs to print its stacks
_LAST_WORDS_S = 1.0  # in which clients that wait for the engine learn that it does not come back

DEFAULT_RULES = RestartRules()
OnNews = Callable[[str], None]


class SupervisedEngine:
    """An engine that outlives its processes.

    process: not started yet; this object owns it. rules: how often it is started again. hang_s: seconds after
    which a step may count as hung (frontend/engine/watchdog.py); 0 = none does. on_news: called by the
    supervisor's thread with a line for each death and each restart. start() and wait_ready() are those of the first
    process, whose failure is the caller's error; afterwards the thread watches.
    """

    def __init__(
        self,
        process: EngineProcess,
        rules: RestartRules = DEFAULT_RULES,
        *,
        hang_s: float = DEFAULT_HANG_S,
        on_news: OnNews = lambda text: None,
    ) -> None:
        self.process = process
        self.supervisor = Supervisor(rules)
        self._on_news = on_news
        self._lock = threading.Lock()  # held while a process is started, so that an end finds it
        self._is_closing = False
        self._num_drains = 0
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._num_oom_kills = 0
        self._watchdog = Watchdog(hang_s)
        self._was_hung = False  # the present process, which is being killed for it
        self._address: str | None = None
        self.ended_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # readable once the engine has ended for good
        self.last_cause: Cause | None = None  # of the last death

    def start(self) -> None:
        """Start the first process and return at once. Errors: those of EngineProcess.start."""
        self._spawn()

    def wait_ready(self) -> None:
        """Wait until the first process answers; from then on it is watched. Errors: EngineProcess.wait_ready's."""
        self.process.wait_ready()
        self._address = self.process.address
        self.supervisor.on_ready(time.monotonic())
        self._thread = threading.Thread(target=self._run, name="engine-supervisor", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Return the address of the first process; locate() knows the present one."""
        return self.process.address

    def locate(self) -> str | None:
        """Return where the engine is, or will be; None when it does not come back. For ZmqTransport."""
        return None if self._ended.is_set() else self._address

    def describe_end(self) -> str:
        """Return how the engine ended, in a sentence part: "the engine process ..."."""
        return f"the engine process {self.supervisor.text}"

    def drain(self) -> None:
        """Let the engine finish its requests and end; a second call stops it at once. This does not wait."""
        self._num_drains += 1
        self.supervisor.on_drain()
        self.process.drain()

    def close(self, timeout: float = 5.0) -> None:
        """End the engine within `timeout` seconds, and the thread. A second call does nothing."""
        self._is_closing = True
        with self._lock:
            self.process.stop(timeout)
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()
        self.process.close()
        if threading.current_thread() is not self._thread:  # which may look at it once more
            self.process.drop_black_box()
        self._release()

    def _release(self) -> None:
        for name in ("_wake", "ended_fd"):
            fd = getattr(self, name)
            if fd >= 0:
                setattr(self, name, -1)
                os.close(fd)

    # --- the thread ---

    def _run(self) -> None:
        while not self._is_closing and self.supervisor.state is not State.ENDED:
            if self.supervisor.state is State.READY:
                self._watch()
            elif not self._sleep(self.supervisor.start_in_s(time.monotonic())):
                self._start_again()
        self._end()

    def _watch(self) -> None:
        """Wait for the end of the process or for the next look."""
        poller = select.poll()
        for fd in (self.process.pidfd, self._wake):
            poller.register(fd, select.POLLIN)
        if self.process.pidfd in dict(poller.poll(_TICK_S * 1000)):
            self._bury()
        elif self._watchdog.look(self.process.black_box.read(), time.monotonic()):
            self._kill_hung()
        elif (hunt := self.supervisor.hunt).is_searching and hunt.on_step(self._rows(), time.monotonic()):
            self.process.isolate(hunt.isolate(time.monotonic()))
        elif self.supervisor.take_drain(time.monotonic()):
            for _ in range(self._num_drains):
                self.process.drain()

    def _rows(self) -> list[Suspect]:
        """Return what the present process runs; nothing of the one before it."""
        box = self.process.black_box
        return box.last_rows() if box.read().epoch == self.process.epoch else []

    def _kill_hung(self) -> None:
        """End a process that hangs. First it is asked for its stacks; one that is stopped cannot answer."""
        self._tell(f"the engine process ({self.process.pid}) hangs: {self._watchdog.text}")
        self._was_hung = True
        os.kill(self.process.pid, signal.SIGUSR1)
        if not self.process.wait(_STACKS_S):
            os.kill(self.process.pid, signal.SIGKILL)
        self._bury()

    def _sleep(self, seconds: float) -> bool:
        """Sleep; return whether close() has ended it."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        return bool(poller.poll(seconds * 1000)) or self._is_closing

    def _start_again(self) -> None:
        try:
            self._spawn()
            if self._is_closing:
                return
            self.process.wait_ready()
        except EngineCoreError as error:
            self._mourn(self._death(str(error), was_ready=False))
            return
        self._address = self.process.address
        self.supervisor.on_ready(time.monotonic())
        self._tell(f"the engine is ready again (epoch {self.process.epoch})")

    def _spawn(self) -> None:
        with self._lock:
            if self._is_closing:
                return
            self._num_oom_kills = count_oom_kills()
            self.supervisor.on_start()
            self.process.start()
            self._address = self.process.last_address

    def _bury(self) -> None:
        """Release a process that has died while it was ready."""
        self.process.wait()
        death = self._death(self.process.describe_exit().removeprefix("the engine process "), was_ready=True)
        self.process.close()
        self._mourn(death)

    def _death(self, text: str, *, was_ready: bool) -> Death:
        num_oom_kills = count_oom_kills() - self._num_oom_kills
        was_hung, self._was_hung = self._was_hung, False
        return classify(
            self.process.exit_code, text, was_ready=was_ready, was_hung=was_hung, num_oom_kills=num_oom_kills
        )

    def _mourn(self, death: Death) -> None:
        self.last_cause = death.cause
        now = time.monotonic()
        box = self.process.black_box
        is_its_own = box.read().epoch == self.process.epoch  # not that of a process before it
        self.supervisor.on_death(death, now, box.suspects() if is_its_own else [])
        self.process.isolate(self.supervisor.hunt.isolate(now))
        if self._is_closing:
            return
        if self.supervisor.state is State.WAITING:
            self._tell(f"the engine process {death.text} ({death.cause.value}); it is started again")
        elif death.cause is not Cause.ENDED:
            self._tell(f"the engine process {self.supervisor.text}")

    def _tell(self, text: str) -> None:
        self._on_news(text)

    def _end(self) -> None:
        """Tell everybody who waits that there is no engine any more."""
        self._ended.set()
        if not self._is_closing and self.last_cause is not Cause.ENDED and self.process.is_public:
            say_last_words(self.process.last_address, self.describe_end(), _LAST_WORDS_S)
        if self.ended_fd >= 0:
            os.eventfd_write(self.ended_fd, 1)
