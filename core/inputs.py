"""Messages that the border passes to the engine core, and the core's replies.

The Structs in this file are never sent over the wire. The border makes them for the core, and captures contain them.
"""

from typing import TypeAlias

import msgspec

from ipc.wire.messages import (
    Abort,
    CallDone,
    CallFailed,
    ClientCall,
    Goodbye,
    Outputs,
    RequestFailed,
    Statistics,
    Submission,
)
from ipc.wire.pin_messages import PinList, Pinned
from ipc.wire.scheduling_messages import Explanation, KVEvents
from ipc.wire.weights_messages import UpdateMode, Weights, WeightsMark


class HoldClient(msgspec.Struct, frozen=True, array_like=True, tag=120):
    """Put the client on hold, because too much output waits for it. Its requests give back their rows and wait."""


class ReleaseClient(msgspec.Struct, frozen=True, array_like=True, tag=121):
    """End the client's hold, because it is reading again."""


class SetClientWeight(msgspec.Struct, frozen=True, array_like=True, tag=122):
    """Set the weight of a client that connected under a name that has one."""

    weight: float


class RenewKVEvents(msgspec.Struct, frozen=True, array_like=True, tag=123):
    """Send the client everything that is cached, because some of its KV events were dropped."""


class EndPause(msgspec.Struct, frozen=True, array_like=True, tag=124):
    """End any pause, because the engine drains: during a pause, requests would wait forever."""


class ExecutorLost(msgspec.Struct, frozen=True, array_like=True, tag=125):
    """The executor's processes are gone, with all that they held: rows, K and V, copies of blocks.

    text: how they ended, for humans. is_final: they are not started again, so the engine ends.
    """

    text: str
    is_final: bool = False


class ExecutorRestored(msgspec.Struct, frozen=True, array_like=True, tag=126):
    """The executor takes plans again. It has no requests."""


class BlocksFound(msgspec.Struct, frozen=True, array_like=True, tag=127):
    """The number of consecutive blocks that the store beyond the host has; the answer to a Look (core/kv/orders.py)."""

    ticket: int
    count: int


class BlocksArrived(msgspec.Struct, frozen=True, array_like=True, tag=128):
    """The first `count` blocks of a Fetch are in their slots; the others are missing or damaged."""

    ticket: int
    count: int


class BlocksStored(msgspec.Struct, frozen=True, array_like=True, tag=129):
    """A Store has finished: `count` of its blocks were written. Its slots are no longer read.

    Ticket 0: the number of blocks written from those that finished requests left in the KV cache.
    """

    ticket: int
    count: int


class NewWeights(msgspec.Struct, frozen=True, array_like=True, tag=130):
    """Use these weights from now on, as soon as `mode` allows; the executor has them ready. Answered by Weights."""

    call: int
    mark: WeightsMark
    mode: UpdateMode


#: Answers of the store of blocks beyond the host.
StoreNews: TypeAlias = BlocksFound | BlocksArrived | BlocksStored
#: What an executor in other processes reports to the core.
ExecutorNews: TypeAlias = ExecutorLost | ExecutorRestored
#: Messages that the border passes to the engine, after validation.
EngineInput: TypeAlias = (
    Submission
    | Abort
    | Goodbye
    | ClientCall
    | HoldClient
    | ReleaseClient
    | SetClientWeight
    | RenewKVEvents
    | EndPause
    | ExecutorNews
    | StoreNews
    | NewWeights
)
EngineReply: TypeAlias = (
    Outputs | RequestFailed | Pinned | Statistics | Explanation | KVEvents | Weights | PinList | CallDone | CallFailed
)
