"""The registry of the state: every class that a checkpoint may name, and its fields with their types.

A class that is not listed here cannot be in a checkpoint. Tests compare what engines of all kinds hold with this list.
"""

from enum import Enum
from types import MappingProxyType
from typing import Any, get_type_hints

from core.batch.block_table import OtherKind
from core.batch.carried import Copies
from core.batch.request import Request, Swapped
from core.capture import state_of_batch, state_of_scheduling
from core.capture.state_types import Callback
from core.execution.plan import NewPooling, NewRow, SchedulerOutput
from core.inputs import NewWeights
from core.kv.cache_kinds import CacheKind, CacheRoom
from core.kv.event_feed import KVFeed
from core.kv.orders import Fetch, Leave, Look, Retain, Store, Windows
from core.scheduling.beams.beam_rules import Candidates, Finished, Token
from core.scheduling.block_exchange import PendingFetch
from core.scheduling.decisions import Cause, Decision, Examined, Preempted, Verdict
from core.scheduling.encoder_inputs import ImageInParts
from core.scheduling.outputs import _Rows
from core.scheduling.pins.pinned_prefix import PinnedPrefix
from core.scheduling.scheduler import Scheduler
from core.scheduling.stats import SchedulerStats
from ipc.params.pooling_params import PoolingParams
from ipc.params.sampling_params import SamplingParams
from ipc.wire.feature_messages import FeatureUse
from ipc.wire.kv_events import KVBlocksCleared, KVBlocksRemoved, KVBlocksStored
from ipc.wire.lora_messages import AdapterId
from ipc.wire.messages import FinishReason, Logprobs, RequestFailed
from ipc.wire.pin_messages import Pin, PinAnswer, Pinned
from ipc.wire.pooling_messages import Pooled
from ipc.wire.weights_messages import UpdateMode, WeightsMark

#: The package that contains the checkout's folders: "" in a checkout, "engine_core." in a wheel. Checkpoints omit it.
_HOME_PACKAGE = __name__.removesuffix("core.capture.state_classes")

_OBJECTS: dict[type, dict[Any, str]] = {**state_of_batch.FIELDS, **state_of_scheduling.FIELDS}
_STRUCTS = (NewPooling, NewRow, Request, SchedulerOutput, PendingFetch, PinnedPrefix, Decision, SchedulerStats)
_NAMED = (
    CacheKind,
    CacheRoom,
    Candidates,
    Copies,
    Examined,
    Fetch,
    Finished,
    ImageInParts,
    Leave,
    Look,
    OtherKind,
    Preempted,
    Retain,
    Store,
    Swapped,
    Token,
    Windows,
    _Rows,
)
_ENUMS: tuple[type[Enum], ...] = (Cause, Verdict, FinishReason, UpdateMode)
_MESSAGES = (
    AdapterId,
    FeatureUse,
    KVBlocksCleared,
    KVBlocksRemoved,
    KVBlocksStored,
    Logprobs,
    Pin,
    PinAnswer,
    Pinned,
    Pooled,
    PoolingParams,
    RequestFailed,
    SamplingParams,
    NewWeights,
    WeightsMark,
)


class UnknownObjectError(Exception):
    """Error: the state has an object of a type that is not allowed in checkpoints."""


def _name(kind: type) -> str:
    return f"{kind.__module__.removeprefix(_HOME_PACKAGE)}:{kind.__qualname__}"


def _fields(kind: type) -> dict[str, Any]:
    """Return the types of an object's fields by name. A subclass may narrow its base's types."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        for hint, names in _OBJECTS.get(base, {}).items():
            found.update(dict.fromkeys(names.split(), hint))
    return found


def _methods() -> frozenset[str]:
    callbacks: list[Callback] = []
    for hints in _OBJECTS.values():
        for hint in hints:
            callbacks += [one for one in (hint, *getattr(hint, "__args__", ())) if isinstance(one, Callback)]
    return frozenset(name for callback in callbacks for _, name in callback.allowed)


#: Classes of each kind by name in a checkpoint.
OBJECTS = MappingProxyType({_name(kind): kind for kind in _OBJECTS})
STRUCTS = MappingProxyType({_name(kind): kind for kind in _STRUCTS})
NAMED = MappingProxyType({_name(kind): kind for kind in _NAMED})
ENUMS = MappingProxyType({_name(kind): kind for kind in _ENUMS})
MESSAGES = MappingProxyType({_name(kind): kind for kind in _MESSAGES})
#: The types of fields by class and name, for objects, structs and named tuples.
FIELDS: MappingProxyType[type, dict[str, Any]] = MappingProxyType(
    {
        **{kind: _fields(kind) for kind in _OBJECTS},
        **{kind: get_type_hints(kind) for kind in (*_STRUCTS, *_NAMED)},
    }
)
#: Names of the methods that a field may hold.
METHODS = _methods()
#: The types of EngineCore.state()'s entries.
STATE: tuple[Any, ...] = (int, Scheduler, KVFeed, list[SchedulerOutput])

_NAMES = {kind: name for kinds in (OBJECTS, STRUCTS, NAMED, ENUMS, MESSAGES) for name, kind in kinds.items()}


def class_name(kind: type) -> str:
    """Return "module:name" of a class of the state. Errors: UnknownObjectError for another class."""
    if kind not in _NAMES:
        raise UnknownObjectError(f"{_name(kind)} is not a class that a checkpoint may have")
    return _NAMES[kind]
