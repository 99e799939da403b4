"""Messages that the border passes to the engine core, and the core's replies.

The Structs of this file are never on the wire. The border makes them for the core; captures contain them.
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
from ipc.wire.scheduling_messages import Explanation, KVEvents


class HoldClient(msgspec.Struct, frozen=True, array_like=True, tag=120):
    """Put the client on hold, because too much waits to be sent to it: its requests give back their rows and wait."""


class ReleaseClient(msgspec.Struct, frozen=True, array_like=True, tag=121):
    """End the client's hold, because it reads again."""


class SetClientWeight(msgspec.Struct, frozen=True, array_like=True, tag=122):
    """Set the weight of a client that has connected under a name with a weight."""

    weight: float


class RenewKVEvents(msgspec.Struct, frozen=True, array_like=True, tag=123):
    """Send the client everything that is cached again, because KV events for it were dropped."""


class EndPause(msgspec.Struct, frozen=True, array_like=True, tag=124):
    """End any pause, because the engine drains: under a pause, requests would wait for ever."""


class ExecutorLost(msgspec.Struct, frozen=True, array_like=True, tag=125):
    """The executor's processes are gone, with all that they held of requests: rows, K and V, copies of blocks.

    text: how they ended, for people. is_final: they are not started again, so the engine ends.
    """

    text: str
    is_final: bool = False


class ExecutorRestored(msgspec.Struct, frozen=True, array_like=True, tag=126):
    """The executor takes plans again, and knows of no request."""


class BlocksFound(msgspec.Struct, frozen=True, array_like=True, tag=127):
    """So many blocks in a row are beyond the host; the answer to a Look (core/kv/orders.py)."""

    ticket: int
    count: int


class BlocksArrived(msgspec.Struct, frozen=True, array_like=True, tag=128):
    """The first `count` blocks of a Fetch are in their slots; the others are missing or damaged."""

    ticket: int
    count: int


class BlocksStored(msgspec.Struct, frozen=True, array_like=True, tag=129):
    """A Store has ended: `count` of its blocks were written. Its slots are not read any more.

    Ticket 0: so many blocks were written that requests have left in the KV cache.
    """

    ticket: int
    count: int


#: What a store of blocks beyond the host answers.
StoreNews: TypeAlias = BlocksFound | BlocksArrived | BlocksStored
#: What an executor with processes of its own tells the core.
ExecutorNews: TypeAlias = ExecutorLost | ExecutorRestored
#: Messages that the border passes to the engine. Requests are validated before that.
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
)
EngineReply: TypeAlias = Outputs | RequestFailed | Statistics | Explanation | KVEvents | CallDone | CallFailed
