"""SupervisedEngine: an engine process that is restarted when it dies. A thread watches it; Supervisor decides."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable

import zmq

from frontend.engine.death import Cause, Death, classify, count_oom_kills
from frontend.engine.process import EngineProcess
from frontend.engine.restart_policy import RestartRules
from frontend.engine.signs import DEFAULT_HANG_S, describe_silence, limit_s
from frontend.engine.standby import Standby
from frontend.engine.standby_plan import StandbyKind, StandbyState
from frontend.engine.supervisor import State, Supervisor
from ipc.errors import AddressError, EngineCoreError
from ipc.log_lines import LogFormat
from ipc.machine.child_process import HOME_PACKAGE, child_environment, inherited_stream
from ipc.records.black_box import Reading, Suspect
from ipc.records.flight_ring import FlightFile
from ipc.wire.messages import ErrorCode, Refused, encode
from ipc.wire.sockets import Context, bind_router

_TICK_S = 0.5  # between two checks of a running engine
_STACKS_S = 0.5  # time for a hung process to print its stacks
_LAST_WORDS_S = 1.0  # time in which waiting clients are told that the engine does not come back

DEFAULT_RULES = RestartRules()
OnNews = Callable[[str], None]


class SupervisedEngine:
    """An engine that survives its processes.

    process: not started yet; this object owns it. rules: how often it is restarted. hang_s: seconds after
    which a step may count as hung (frontend/engine/supervised_engine.py); 0 = never. on_news: called by the
    supervisor's thread with a line for each death and each restart. start() and wait_ready() apply to the first
    process, whose failure is the caller's error; after that the thread watches.
    """

    def __init__(
        self,
        process: EngineProcess,
        rules: RestartRules = DEFAULT_RULES,
        *,
        hang_s: float = DEFAULT_HANG_S,
        standby: StandbyKind = StandbyKind.NO,
        on_news: OnNews = lambda text: None,
    ) -> None:
        self.process = process
        self.supervisor = Supervisor(rules, has_standby=standby is not StandbyKind.NO)
        self._standby_kind = standby
        self.standby: Standby | None = None  # the supervisor's thread's
        self._on_news = on_news
        self._lock = threading.Lock()  # held while a process is started, so that a concurrent end finds it
        self._is_closing = False
        self._num_drains = 0  # requested
        self._told = [0]  # those sent to the present process; a new list for each process
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._num_oom_kills = 0
        self._flights = FlightWriters()
        self.watchdog = Watchdog(hang_s)
        self._was_hung = False  # the present process, which is being killed for it
        self._address: str | None = None
        self.ended_fd = os.eventfd(
            0, os.EFD_CLOEXEC | os.EFD_NONBLOCK
        )  # readable once the engine has ended without a restart
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
        """Return the address of the first process; locate() returns the present one."""
        return self.process.address

    def locate(self) -> str | None:
        """Return the engine's present or future address; None if it does not come back. For ZmqTransport."""
        return None if self._ended.is_set() else self._address

    def describe_end(self) -> str:
        """Return how the engine ended, as a part of a sentence: "the engine process ..."."""
        return f"the engine process {self.supervisor.text}"

    def drain(self) -> None:
        """Let the engine finish its requests and end; a second call stops it at once. This does not wait."""
        self._num_drains += 1
        self.supervisor.on_drain()
        is_first = self._thread is None  # nothing was accepted yet: a starting process may end at once
        if is_first or self.supervisor.is_stopped or self.supervisor.state is State.READY:
            self._tell_drains()  # otherwise it is told once it is ready
        self._rouse()  # between two processes, where a stop is the end

    def close(self, timeout: float = 5.0) -> None:
        """End the engine within `timeout` seconds, and the thread. A second call does nothing."""
        self._is_closing = True
        with self._lock:
            self.process.stop(timeout)
        self._rouse()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()
        self.process.close()
        if threading.current_thread() is not self._thread:  # which may read it once more
            self.process.release()
            self._flights.close()
        self._release()

    def _rouse(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _release(self) -> None:
        for name in ("_wake", "ended_fd"):
            fd = getattr(self, name)
            if fd >= 0:
                setattr(self, name, -1)
                os.close(fd)

    # --- the thread ---

    def _run(self) -> None:
        try:
            self._supervise()
        except Exception as error:  # such as a lack of descriptors: an engine is never left without a watchdog
            self.supervisor.fail(f"could no longer be watched and was ended: {type(error).__name__}: {error}")
            self._tell(f"{self.describe_end()}\n{traceback.format_exc()}")
            with self._lock:
                self.process.stop(0)
        finally:
            self._end()

    def _supervise(self) -> None:
        while not self._is_closing and self.supervisor.state is not State.ENDED:
            if self.supervisor.state is State.READY:
                self._watch()
            elif self.supervisor.is_stopped:
                self.supervisor.give_up()
            elif delay_s := self.supervisor.start_in_s(time.monotonic()):
                self._wait(delay_s)
            else:
                self._start_again()

    def _watch(self) -> None:
        """Wait for the end of the process or for the next check."""
        if self.process.pidfd in self._wait(
            _TICK_S, self.process.pidfd, *(() if self.standby is None else self.standby.fds)
        ):
            self._bury()
            return
        self._keep_standby()
        if self.watchdog.look(self.process.black_box.read(), time.monotonic()):
            self._kill_hung()
        elif (hunt := self.supervisor.hunt).is_searching and hunt.on_step(self._rows(), time.monotonic()):
            self.process.isolate(hunt.isolate(time.monotonic()))
        elif self.supervisor.take_drain(time.monotonic()):
            self._tell_drains()

    def _tell_drains(self) -> None:
        told = self._told  # of the present process
        while told[0] < self._num_drains and self.process.drain():
            told[0] += 1

    def _rows(self) -> list[Suspect]:
        """Return the rows of the present process, without those of the one before it."""
        box = self.process.black_box
        return box.last_rows() if box.read().epoch == self.process.epoch else []

    def _kill_hung(self) -> None:
        """Kill a hung process. First it is asked for its stacks; a stopped one cannot answer."""
        self._tell(f"the engine process ({self.process.pid}) hangs: {self.watchdog.text}")
        self._was_hung = True
        os.kill(self.process.pid, signal.SIGUSR1)
        if not self.process.wait(_STACKS_S):
            os.kill(self.process.pid, signal.SIGKILL)
        self._bury()

    def _wait(self, seconds: float, *fds: int) -> dict[int, int]:
        """Wait until one of these is readable or _rouse() is called, at most this long; return the readable ones."""
        poller = select.poll()
        for fd in (self._wake, *fds):
            poller.register(fd, select.POLLIN)
        ready = dict(poller.poll(seconds * 1000))
        if self._wake in ready:
            os.eventfd_read(self._wake)
        return ready

    def _start_again(self) -> None:
        if not self._has_standby_started():
            if self.supervisor.is_stopped:
                self.supervisor.give_up()
                return
            if not self._has_started():
                return
        self._address = self.process.address
        self.supervisor.on_ready(time.monotonic())
        self._tell(f"the engine is ready again (epoch {self.process.epoch})")

    def _has_started(self) -> bool:
        """Start a new process; return whether it is ready."""
        try:
            self._spawn()
            if self._is_closing:
                return False
            self.process.wait_ready()
        except EngineCoreError as error:
            self._mourn(self._death(str(error), was_ready=False))
            return False
        return True

    def _has_standby_started(self) -> bool:
        """Let the standby become the engine, if there is one; return whether it is ready.

        If that fails, only a moment is lost: a new process is started.
        """
        standby, self.standby = self.standby, None
        is_taken = self.supervisor.take_standby()
        if standby is None:
            return False
        try:
            if is_taken:
                self._spawn(standby)
                self.process.wait_ready()
                return not self._is_closing
        except EngineCoreError as error:
            self.supervisor.standby.on_end(time.monotonic())
            self._tell(f"the standby could not take over: {error}")
        finally:
            standby.close()  # does nothing if it was taken
        return False

    def _spawn(self, standby: Standby | None = None) -> None:
        with self._lock:
            if self._is_closing:
                return
            self._num_oom_kills = count_oom_kills()
            self.supervisor.on_start()
            self._told = [0]
            self.process.start(standby)
            self._address = self.process.last_address
        if self.supervisor.is_stopped:  # since this start began; the process is told about one drain later (on_ready)
            self._tell_drains()

    def _keep_standby(self) -> None:
        """Start a standby when one is due, and check that the existing one is usable."""
        plan, now = self.supervisor.standby, time.monotonic()
        if self.standby is not None and not self.standby.look(now):
            self._tell(f"the standby {self.standby.text}")
            self.standby = None
            plan.on_end(now)
        elif self.standby is not None and self.standby.is_prepared and plan.state is StandbyState.PREPARING:
            plan.on_prepared()
        elif self.standby is None and plan.is_due(now):
            try:
                self.standby = self.process.prepare_next(loads_model=self._standby_kind is StandbyKind.MODEL)
                plan.on_begin()
            except EngineCoreError as error:
                self._tell(f"there is no standby: {error}")
                plan.on_end(now)

    def _bury(self) -> None:
        """Release a process that has died while it was ready."""
        self.process.wait()
        pid = self.process.pid
        death = self._death(self.process.describe_exit().removeprefix("the engine process "), was_ready=True)
        self.process.close()
        flight = self.process.take_flight()
        self._mourn(death)
        if not self._is_closing:
            self._flights.take(flight, pid, death.cause, self.process.config.log_format)

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
        is_its_own = box.read().epoch == self.process.epoch  # not an earlier process's
        self.supervisor.on_death(death, now, box.suspects() if is_its_own else [])
        self.process.isolate(self.supervisor.hunt.isolate(now))
        if self._is_closing:
            return
        if self.supervisor.state is State.WAITING:
            self._tell(f"the engine process {death.text} ({death.cause.value}); it is restarted")
        elif death.cause is not Cause.ENDED:
            self._tell(f"the engine process {self.supervisor.text}")

    def _tell(self, text: str) -> None:
        self._on_news(text)

    def _end(self) -> None:
        """Tell waiting clients that there is no engine anymore, if the last process has not.

        If this object is closed without stopping the engine first, there is no client to tell.
        """
        if self.standby is not None:
            self.standby.close()
            self.standby = None  # and its flight recorder
        self._ended.set()
        is_owed = self.supervisor.is_stopped or not self._is_closing
        try:
            if is_owed and not self.supervisor.has_told and self.process.is_public:
                say_last_words(self.process.last_address, self.describe_end(), _LAST_WORDS_S)
        finally:
            if self.ended_fd >= 0:
                os.eventfd_write(self.ended_fd, 1)


# A final answer for an engine that does not come back: sent at its address to clients that wait for its return.


def say_last_words(address: str, text: str, seconds: float) -> None:
    """Answer each Hello at this address with a refusal, for this many seconds; then leave nothing behind.

    If the address is not available, another engine may already use it: then nothing is sent.
    """
    context: Context = zmq.Context()
    try:
        router = bind_router(context, address)
    except AddressError:
        context.term()
        return
    frame = encode(Refused(ErrorCode.UNAVAILABLE, text))
    end = time.monotonic() + seconds
    try:
        while (left := end - time.monotonic()) > 0:
            if router.socket.poll(int(left * 1000) + 1):
                identity, *_ = router.socket.recv_multipart()
                router.socket.send_multipart([identity, frame])
    finally:
        router.close(100)
        context.term()


# Watchdog: whether an engine hangs, from its black box. It reads no clock.


class Watchdog:
    """How long an engine has shown no sign of life.

    least_s: seconds without a sign that are never too long; 0 = never hung. Only time in which this process ran is
    counted: a suspended machine, or a supervisor without CPU time, is not the engine's fault.
    """

    def __init__(self, least_s: float = DEFAULT_HANG_S, longest_look_s: float = 1.0) -> None:
        self.text = ""  # of the last alarm, for people
        self._least_s = least_s
        self._longest_look_s = longest_look_s  # most seconds counted for one check, however long ago the last one was
        self._last: Reading | None = None
        self._looked_at = 0.0
        self._still_s = 0.0

    def look(self, reading: Reading, now: float) -> bool:
        """Return whether the engine hangs. now: seconds; called several times a second."""
        if reading != self._last:
            self._still_s = 0.0
        else:
            self._still_s += min(max(0.0, now - self._looked_at), self._longest_look_s)
        self._last, self._looked_at = reading, now
        limit = limit_s(reading, self._least_s)
        if self._least_s <= 0 or self._still_s <= limit:
            return False
        self.text = describe_silence(reading, self._still_s, limit)
        self._still_s = 0.0
        return True


# FlightWriters: the processes that write the flight recorders of dead engines to files, while the next engine runs.


#: Deaths whose flight recorders are written.
WRITTEN = (Cause.FAILED, Cause.CRASHED, Cause.OUT_OF_MEMORY, Cause.HUNG, Cause.KILLED)
_MOST = 3  # at the same time; if an engine dies faster than they write, further deaths add nothing
_CLOSE_S = 2.0  # for the last ones to end


class FlightWriters:
    """The writers of one owner."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[bytes]] = []

    def take(self, flight: FlightFile | None, pid: int, cause: Cause, log_format: LogFormat) -> None:
        """Have a dead engine's flight recorder written, if its cause of death requires it. pid: the engine's;
        log_format: of its log lines. This does not wait.
        """
        self._running = [one for one in self._running if one.poll() is None]
        if flight is None or cause not in WRITTEN or len(self._running) >= _MOST or not sys.executable:
            return
        with contextlib.suppress(OSError):  # no memory or no processes: the next engine matters more
            self._running.append(
                subprocess.Popen(
                    [
                        *(sys.executable, "-P", "-m", f"{HOME_PACKAGE}core.capture.write_flight"),
                        *(str(flight.fd), str(pid), log_format),
                    ],
                    pass_fds=[flight.fd],
                    stdin=subprocess.DEVNULL,
                    env=child_environment({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}),
                    start_new_session=True,  # Ctrl-C at a terminal is meant for the engine
                    stdout=inherited_stream(1),
                    stderr=inherited_stream(2),
                )
            )

    def close(self) -> None:
        """Wait for the writers; those that take longer continue without this process."""
        end = time.monotonic() + _CLOSE_S
        for one in self._running:
            try:
                one.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                threading.Thread(target=one.wait, daemon=True).start()
        self._running = []
