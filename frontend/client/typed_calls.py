"""TypedCalls: the closed set of questions to an engine beside requests, as methods; ipc.messages.CALLS is its table."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from ipc.call import Call
from ipc.errors import CallFailedError
from ipc.messages import (
    BeginDrain,
    CallDone,
    CallFailed,
    CallResult,
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
from ipc.scheduling_messages import (
    EVERY_REQUEST,
    OWN_SESSION,
    Explain,
    Explanation,
    FollowKVEvents,
    UnfollowKVEvents,
)

_Result = TypeVar("_Result", TokenizerFiles, Statistics, ModelInformation, Explanation, CallDone)


class TypedCalls(Protocol):
    """Every method waits for the engine's answer, at most `timeout` seconds (None = the client's own limit).

    Errors of all: CallFailedError when the engine refuses, does not answer in time or the connection was lost;
    EngineDeadError at once when the engine is gone. pause, resume, drain and shutdown are the owner's.
    """

    def call(self, make: Callable[[int], Call], name: str, timeout: float | None) -> CallResult:
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

    def explain(
        self,
        number: int = EVERY_REQUEST,
        *,
        session: int = OWN_SESSION,
        limit: int = 100,
        timeout: float | None = None,
    ) -> Explanation:
        """Why a request runs or does not: this client's `number`, or that of another session; without a number the
        scheduler in short, with at most `limit` requests. CallFailedError also for a request that does not live."""
        return self._ask(lambda call: Explain(call, number, session, limit), Explanation, timeout, "Explain")

    def begin_kv_events(self, timeout: float | None = None) -> None:
        """Have the engine tell all that its prefix cache holds, and then every change. See follow_kv_events()."""
        self._ask(FollowKVEvents, CallDone, timeout)

    def end_kv_events(self, timeout: float | None = None) -> None:
        """Have it stop that."""
        self._ask(UnfollowKVEvents, CallDone, timeout)

    def reset_prefix_cache(self, timeout: float | None = None) -> None:
        """Forget cached blocks that no request holds."""
        self._ask(ResetPrefixCache, CallDone, timeout)

    def pause(self, mode: PauseMode = PauseMode.ALL, timeout: float | None = None) -> None:
        """Let no request begin (NEW: those that have begun finish) or nothing run (ALL), until resume(); of all
        clients."""
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
        self, make: Callable[[int], Call], expected: type[_Result], timeout: float | None, name: str = ""
    ) -> _Result:
        name = name or getattr(make, "__name__", "")
        result = self.call(make, name, timeout)
        if isinstance(result, CallFailed):
            raise CallFailedError(f"{name}: {result.message} ({ErrorCode(result.code).name})")
        if not isinstance(result, expected):
            raise CallFailedError(f"{name} was answered with {type(result).__name__}")
        return result
