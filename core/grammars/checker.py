"""CheckedGrammars: an engine's grammars, each compiled in another process before the engine compiles it.

Compiling takes cores and the GIL from the engine's steps. Invalid or slow grammars are refused without using either.
The process (core/grammars/check.py) is started for the first request with a grammar.

Building the vocabulary takes about 0.3 s, during which llguidance holds the GIL several times for tens of milliseconds.
If the engine is idle before its first grammar, it builds the vocabulary then.
"""

import contextlib
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable

from core.grammars.check_messages import Check, decode_verdict, encode_message
from core.grammars.grammars import GrammarKey, Grammars, constraint_of, key_of
from ipc.errors import EngineCoreError, EngineStartError, InvalidRequestError, UnsupportedParameterError
from ipc.machine.bounded_process import BoundedProcess
from ipc.machine.channel import ChannelEndedError
from ipc.machine.child_process import describe_exit
from ipc.params.structured_outputs import StructuredOutputsParams
from ipc.wire.messages import Submission

#: Limits for compiling one grammar: CPU time and memory. The engine compiles what passes once more.
MAX_CPU_MS, MAX_MEMORY_BYTES = 1000, 1 << 30
#: Fraction of the time that grammars of one client may be compiled while others have unfinished requests. A flood of
#: grammars took 42 % of one of two cores, and steps running at the same time waited for cores.
SHARE = 0.25
#: Attempts per grammar. The first process may have been killed from outside.
_MAX_ATTEMPTS = 2
#: Grammars that have killed the process are refused without another attempt, as long as they are among this many last
#: ones.
_MAX_REMEMBERED = 64
# signals from its limits of time, memory and depth
_ITS_OWN_SIGNALS = {-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV}


class _Process(BoundedProcess):
    """A running checker process."""

    def __init__(self, max_cpu_ms: int, max_memory_bytes: int) -> None:
        """Start it. Errors: OSError, EngineStartError."""
        super().__init__("core.grammars.check", max_cpu_ms, max_memory_bytes)

    def load(self, vocabulary: bytes) -> None:
        """Make it build this vocabulary, which is a message. Errors: ChannelEndedError."""
        self.channel.send(vocabulary)

    def check(self, params: StructuredOutputsParams) -> str:
        """Return why the grammar cannot be used; "" = it can. Errors: ChannelEndedError."""
        return decode_verdict(self.ask(encode_message(Check(params)))).error


class CheckedGrammars:
    """A Preparer (core/border/preparation.py). One thread calls start() and prepare(); any may call the others."""

    share = SHARE

    def __init__(
        self, grammars: Grammars, max_cpu_ms: int = MAX_CPU_MS, max_memory_bytes: int = MAX_MEMORY_BYTES
    ) -> None:
        """max_cpu_ms, max_memory_bytes: the limits of core/grammars/check.py."""
        self._grammars = grammars
        self._bounds = max_cpu_ms, max_memory_bytes
        self.process: _Process | None = None
        self._fatal: OrderedDict[GrammarKey, str] = OrderedDict()  # why a grammar is refused; for prepare()
        self._vocabulary = b""  # the message for a new process; b"" = not needed so far
        self._loading = threading.Lock()  # for the vocabulary
        self._ahead: threading.Thread | None = None
        self._is_closed = self._is_asking = False
        self._lock = threading.Lock()  # for these

    def needs(self, message: Submission) -> bool:
        """Return whether the request's grammar still has to be compiled."""
        return self._grammars.needs(message)

    def start(self) -> None:
        """Start the process and build the vocabulary, which takes about 0.3 s."""
        with contextlib.suppress(EngineCoreError):
            self._attempt(lambda process: "")

    def prepare(self, message: Submission) -> bool:
        """Compile the request's grammar. Return False, because nothing is left. Errors: InvalidRequestError."""
        params = constraint_of(message)
        if params is not None and self._grammars.needs(message):  # a grammar compiled in the meantime has passed
            if (why := self._fatal.get(key_of(params))) is not None:
                raise InvalidRequestError(why)
            self._check(params)
            self._grammars.prepare(message)
        return False

    def load_ahead(self) -> None:
        """Build the vocabulary in a separate thread, unless this was called before. For an idle engine.

        If llguidance is not installed, or the model has no vocabulary, nothing happens. The first request with a
        grammar is refused then.
        """
        if self._ahead is None:
            self._ahead = threading.Thread(target=self._load_ahead, name="vocabulary", daemon=True)
            self._ahead.start()

    def close(self) -> None:
        """End the process. A running prepare() fails, and so do later ones."""
        with self._lock:
            self._is_closed = True
            process = self.process
            if process is None:
                return
            if self._is_asking:
                process.kill()
            else:
                process.end()
                self.process = None

    def _load_ahead(self) -> None:
        with contextlib.suppress(EngineCoreError):
            self._grammars.check_usable()
            self._message()
            self._grammars.load()
            # Imported late: the check that `kernels` is our package runs after this module is imported.
            from kernels.memory.free_memory import return_free_memory

            return_free_memory()

    def _message(self) -> bytes:
        """Return the vocabulary for a new process. Errors: UnsupportedParameterError."""
        with self._loading:
            self._vocabulary = self._vocabulary or encode_message(self._grammars.vocabulary())
            return self._vocabulary

    def _check(self, params: StructuredOutputsParams) -> None:
        """Have the process compile the grammar. Errors: InvalidRequestError."""
        answer: str | int = ""
        for _ in range(_MAX_ATTEMPTS):
            answer = self._attempt(lambda process: process.check(params))
            if answer == "":
                return
            if isinstance(answer, str):
                raise InvalidRequestError(answer)
            if answer == -signal.SIGPROF:
                break
        assert isinstance(answer, int)
        if answer in _ITS_OWN_SIGNALS:
            self._fatal[key_of(params)] = self._why(answer)
            if len(self._fatal) > _MAX_REMEMBERED:
                self._fatal.popitem(last=False)
        raise InvalidRequestError(self._why(answer))

    def _attempt(self, use: Callable[[_Process], str]) -> str | int:
        """Start the process if necessary, and return use(process), or its exit code if it has ended.

        Errors: InvalidRequestError, UnsupportedParameterError.
        """
        process, is_new = self._start_asking()
        try:
            if is_new:
                process.load(self._message())
            self._grammars.load()  # once, at the same time as the process, which does the same
            return use(process)
        except ChannelEndedError:
            return self._end(process)
        except UnsupportedParameterError:  # this model has no vocabulary
            self._end(process)
            raise
        finally:
            with self._lock:
                self._is_asking = False

    def _start_asking(self) -> tuple[_Process, bool]:
        """Return the process, and whether it was just started and has no vocabulary yet.

        Errors: InvalidRequestError.
        """
        self._grammars.check_usable()
        with self._lock:
            if self._is_closed:
                raise InvalidRequestError("the engine is stopping")
            if is_new := self.process is None:
                try:
                    self.process = _Process(*self._bounds)
                except (OSError, EngineStartError) as error:
                    text = f"the process that checks grammars could not be started: {error}"
                    raise InvalidRequestError(text) from error
            self._is_asking = True
            return self.process, is_new

    def _end(self, process: _Process) -> int:
        with self._lock:
            self.process = None
        return process.end()

    def _why(self, code: int) -> str:
        """Return why a grammar is refused if its process ended with this code."""
        max_cpu_ms, max_bytes = self._bounds
        if code == -signal.SIGPROF:
            return f"the grammar of structured_outputs takes more than {max_cpu_ms} ms of CPU time: simplify it"
        return (
            f"the grammar of structured_outputs cannot be used: the process that compiled it {describe_exit(code)}, "
            f"{_MAX_ATTEMPTS} times; it may take more than {max_bytes >> 20} MiB of memory, or nest too deeply"
        )
