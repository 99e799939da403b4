"""TypedCalls: a client's calls to its engine, other than requests, as methods. ipc.wire.messages.CALLS lists them."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from ipc.errors import CallFailedError
from ipc.wire.call import Call
from ipc.wire.fleet_messages import ChangeReplica, GetReplicas, ReplicaChange, ReplicaList
from ipc.wire.lora_messages import ListLora, LoadLora, LoraAdapter, LoraAdapters, UnloadLora
from ipc.wire.messages import (
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
from ipc.wire.metrics_messages import GetMetrics, Metrics
from ipc.wire.pin_messages import ForkPin, GetPins, PinList, ReleasePin
from ipc.wire.scheduling_messages import (
    EVERY_REQUEST,
    OWN_SESSION,
    Explain,
    Explanation,
    FollowKVEvents,
    StopRequest,
    UnfollowKVEvents,
)
from ipc.wire.weights_messages import GetWeights, Sleep, UpdateMode, UpdateWeights, WakeUp, Weights, WeightsMark

_Result = TypeVar(
    "_Result",
    TokenizerFiles,
    Statistics,
    ModelInformation,
    Explanation,
    Metrics,
    LoraAdapters,
    ReplicaList,
    Weights,
    PinList,
    CallDone,
)


class TypedCalls(Protocol):
    """Methods that wait for the engine's answer, at most `timeout` seconds (None = the client's own limit).

    Errors of all methods: CallFailedError if the engine refuses, does not answer in time or the connection was lost;
    EngineDeadError at once if the engine is gone. Owner only: pause, resume, stop_request, load_lora, unload_lora,
    update_weights, sleep, wake_up, drain, upgrade, shutdown, and for a fleet join and leave.
    """

    def call(self, make: Callable[[int], Call], name: str, timeout: float | None) -> CallResult:
        """Send the call that `make` returns for a new number; return the answer to that number. name: for errors."""

    def statistics(self, timeout: float | None = None) -> Statistics:
        """Return the engine's counters and gauges."""
        return self._ask(GetStatistics, Statistics, timeout)

    def metrics(self, timeout: float | None = None) -> Metrics:
        """Return the measurements of all clients' requests, without waiting for a step."""
        return self._ask(GetMetrics, Metrics, timeout)

    def model_information(self, timeout: float | None = None) -> ModelInformation:
        """Return the model, sizes and options of the engine."""
        return self._ask(GetModelInformation, ModelInformation, timeout)

    def tokenizer_files(self, timeout: float | None = None) -> TokenizerFiles:
        """Return the engine's copy of the model's tokenizer files."""
        return self._ask(GetTokenizer, TokenizerFiles, timeout)

    def explain(
        self,
        number: int = EVERY_REQUEST,
        *,
        session: int = OWN_SESSION,
        limit: int = 100,
        timeout: float | None = None,
    ) -> Explanation:
        """Explain why a request runs or does not: `number` of this client, or of another `session`.

        Without a number the answer is a summary of the scheduler with at most `limit` requests. CallFailedError also
        for a request that is not live.
        """
        return self._ask(lambda call: Explain(call, number, session, limit), Explanation, timeout, "Explain")

    def begin_kv_events(self, timeout: float | None = None) -> None:
        """Ask the engine to send the content of its prefix cache, then every change. See follow_kv_events()."""
        self._ask(FollowKVEvents, CallDone, timeout)

    def end_kv_events(self, timeout: float | None = None) -> None:
        """Ask the engine to send no more KV events."""
        self._ask(UnfollowKVEvents, CallDone, timeout)

    def reset_prefix_cache(self, timeout: float | None = None) -> None:
        """Drop all cached blocks that no running request holds."""
        self._ask(ResetPrefixCache, CallDone, timeout)

    def pins(self, tenant: str = "", timeout: float | None = None) -> PinList:
        """Return a tenant's pins, and how much it may pin."""
        return self._ask(lambda call: GetPins(call, tenant), PinList, timeout, "GetPins")

    def release_pin(self, name: str, tenant: str = "", timeout: float | None = None) -> None:
        """End a named pin. CallFailedError also if there is none."""
        self._ask(lambda call: ReleasePin(call, name, tenant), CallDone, timeout, "ReleasePin")

    def fork_pin(self, name: str, new_name: str, ttl_ms: int, tenant: str = "", timeout: float | None = None) -> None:
        """Pin what a named pin has under another name too, for ttl_ms. CallFailedError also if there is no room."""
        self._ask(lambda call: ForkPin(call, name, new_name, ttl_ms, tenant), CallDone, timeout, "ForkPin")

    def pause(self, mode: PauseMode = PauseMode.ALL, timeout: float | None = None) -> None:
        """Pause the engine for all clients until resume(): no request begins (NEW), or none runs (ALL).

        With NEW, requests that have begun continue.
        """
        self._ask(lambda call: Pause(call, mode), CallDone, timeout, "Pause")

    def resume(self, timeout: float | None = None) -> None:
        """End a pause."""
        self._ask(Resume, CallDone, timeout)

    def load_lora(self, name: str, path: str, timeout: float | None = None) -> LoraAdapter:
        """Let the engine read an adapter (LoRA) while steps go on; return it with its content's digest.

        path: in the engine's file system. CallFailedError also for files that are not an adapter of the model.
        """
        answer = self._ask(lambda call: LoadLora(call, name, path), LoraAdapters, timeout, "LoadLora")
        (loaded,) = answer.adapters
        return loaded

    def unload_lora(self, name: str, timeout: float | None = None) -> None:
        """Remove an adapter's name. Running requests continue. CallFailedError also for an unknown name."""
        self._ask(lambda call: UnloadLora(call, name), CallDone, timeout, "UnloadLora")

    def list_lora(self, timeout: float | None = None) -> list[LoraAdapter]:
        """Return the adapters that requests may name. CallFailedError also if the engine has no adapters."""
        answer = self.lora_adapters(timeout)
        if not answer.is_enabled:
            raise CallFailedError("ListLora: this engine has no adapters: start it with enable_lora")
        return answer.adapters

    def lora_adapters(self, timeout: float | None = None) -> LoraAdapters:
        """Return the adapters that requests may name, and whether the engine has adapters at all."""
        return self._ask(ListLora, LoraAdapters, timeout)

    def update_weights(
        self, path: str, mode: UpdateMode = UpdateMode.WAIT, timeout: float | None = None
    ) -> WeightsMark:
        """Let the engine read other weights while steps go on, then use them; return what it computes with from then.

        path: in the engine's file system: a safetensors file, a folder of them, or a .gguf file, with all tensors of
        the model. CallFailedError also for files that do not fit the model, with which nothing changes.
        """
        return self._ask(lambda call: UpdateWeights(call, path, mode), Weights, timeout, "UpdateWeights").mark

    def weights(self, timeout: float | None = None) -> Weights:
        """Return the weights that the engine computes with, and whether others wait or they are gone."""
        return self._ask(GetWeights, Weights, timeout)

    def sleep(self, level: int = 1, timeout: float | None = None) -> None:
        """Let the engine free its memory until wake_up(): the KV cache's (1), and the weights' too (2)."""
        self._ask(lambda call: Sleep(call, level), CallDone, timeout, "Sleep")

    def wake_up(self, timeout: float | None = None) -> None:
        """Let the engine run requests again. CallFailedError if it sleeps without weights."""
        self._ask(WakeUp, CallDone, timeout)

    def stop_request(self, session: int, number: int, timeout: float | None = None) -> None:
        """Abort a request of any session; do nothing if it is not live."""
        self._ask(lambda call: StopRequest(call, session, number), CallDone, timeout, "StopRequest")

    def drain(self, timeout: float | None = None, *, move_after: float | None = None) -> None:
        """Refuse new requests and end the engine after the last one. Does not wait for the end.

        move_after: seconds after which the engine ends in any case; unfinished requests continue at the next engine
        that their clients find, at this address or the one from the client's `locate`.
        """
        move_ms = -1 if move_after is None else int(move_after * 1000)
        self._ask(lambda call: BeginDrain(call, move_ms), CallDone, timeout, "BeginDrain")

    def upgrade(self, timeout: float | None = None) -> None:
        """End the engine at once; its supervisor starts the next one, at which all requests continue.

        CallFailedError if it has no supervisor.
        """
        self._ask(lambda call: BeginDrain(call, 0, True), CallDone, timeout, "BeginDrain")

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine at once."""
        self._ask(Shutdown, CallDone, timeout)

    def replicas(self, timeout: float | None = None) -> ReplicaList:
        """Return the replicas of a fleet. CallFailedError if the peer is an engine, which has none."""
        return self._ask(GetReplicas, ReplicaList, timeout)

    def join(self, address: str, timeout: float | None = None, *, prefills: bool = False) -> None:
        """Let a replica join the fleet, or change its role. Does not wait for its answer: see replicas().

        prefills: it computes long prompts for the others.
        """
        change = ReplicaChange.JOIN_PREFILL if prefills else ReplicaChange.JOIN
        self._ask(lambda call: ChangeReplica(call, change, address), CallDone, timeout, "ChangeReplica")

    def leave(self, address: str, timeout: float | None = None, *, move_after: float | None = None) -> None:
        """Let a replica leave the fleet after the last of its requests. Does not wait for that.

        Its waiting requests move at once. move_after: seconds after which its running requests continue at other
        replicas.
        """
        move_ms = -1 if move_after is None else int(move_after * 1000)
        change = ReplicaChange.LEAVE
        self._ask(lambda call: ChangeReplica(call, change, address, move_ms), CallDone, timeout, "ChangeReplica")

    def _ask(
        self, make: Callable[[int], Call], expected: type[_Result], timeout: float | None, name: str = ""
    ) -> _Result:
        name = name or getattr(make, "__name__", "")
        result = self.call(make, name, timeout)
        if isinstance(result, CallFailed):
            failed = CallFailedError(f"{name}: {result.message} ({ErrorCode(result.code).name})")
            failed.code = ErrorCode(result.code).name
            raise failed
        if not isinstance(result, expected):
            raise CallFailedError(f"{name} was answered with {type(result).__name__}")
        return result
