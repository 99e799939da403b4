"""TypedCalls: the closed set of questions to an engine beside requests, as methods; ipc.messages.CALLS is its table."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from ipc.errors import CallFailedError
from ipc.messages import (
    BeginDrain,
    CallDone,
    CallFailed,
    CallResult,
    ClientMessage,
    ErrorCode,
    GetModelInformation,
    GetStatistics,
    GetTokenizer,
    ModelInformation,
    Pause,
    PauseMode,
    ResetPrefixCache,
    Resume,
    Shutdown,
    Statistics,
    TokenizerFiles,
)

_Result = TypeVar("_Result", TokenizerFiles, Statistics, ModelInformation, CallDone)


class TypedCalls(Protocol):
    """Every method waits for the engine's answer, at most `timeout` seconds (None = the client's own limit).

    Errors of all: CallFailedError when the engine refuses, does not answer in time or the connection was lost;
    EngineDeadError at once when the engine is gone. pause, resume, drain and shutdown are the owner's.
    """

    def call(self, make: Callable[[int], ClientMessage], name: str, timeout: float | None) -> CallResult:
        """Send the call that `make` makes of a fresh number, and wait for the answer to that number."""

    def statistics(self, timeout: float | None = None) -> Statistics:
        """The engine's counters and gauges."""
        return self._ask(GetStatistics, Statistics, timeout)

    def model_information(self, timeout: float | None = None) -> ModelInformation:
        """What the engine runs and how."""
        return self._ask(GetModelInformation, ModelInformation, timeout)

    def tokenizer_files(self, timeout: float | None = None) -> TokenizerFiles:
        """The model's text side as the engine has it."""
        return self._ask(GetTokenizer, TokenizerFiles, timeout)

    def reset_prefix_cache(self, timeout: float | None = None) -> None:
        """Forget cached blocks that no request holds."""
        self._ask(ResetPrefixCache, CallDone, timeout)

    def pause(self, mode: PauseMode = PauseMode.ALL, timeout: float | None = None) -> None:
        """Let no request start (NEW) or nothing run (ALL) until resume(), for all clients."""
        self._ask(lambda call: Pause(call, mode), CallDone, timeout, "Pause")

    def resume(self, timeout: float | None = None) -> None:
        """End a pause."""
        self._ask(Resume, CallDone, timeout)

    def drain(self, timeout: float | None = None) -> None:
        """Take no more requests and end after the last; does not wait for that."""
        self._ask(BeginDrain, CallDone, timeout)

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine at once."""
        self._ask(Shutdown, CallDone, timeout)

    def _ask(
        self, make: Callable[[int], ClientMessage], expected: type[_Result], timeout: float | None, name: str = ""
    ) -> _Result:
        name = name or getattr(make, "__name__", "")
        result = self.call(make, name, timeout)
        if isinstance(result, CallFailed):
            raise CallFailedError(f"{name}: {result.message} ({ErrorCode(result.code).name})")
        if not isinstance(result, expected):
            raise CallFailedError(f"{name} was answered with {type(result).__name__}")
        return result
