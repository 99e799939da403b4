"""What the border lets through to the engine core, and what the core answers.

The Structs of this file are never on the wire: they are the border's own words to the core, and part of its log.
"""

from typing import TypeAlias

import msgspec

from ipc.messages import (
    Abort,
    AddRequest,
    CallDone,
    CallFailed,
    ClientCall,
    Goodbye,
    Outputs,
    RequestFailed,
    Statistics,
)
from ipc.scheduling_messages import Explanation, KVEvents


class HoldClient(msgspec.Struct, frozen=True, array_like=True, tag=120):
    """Too much waits to be sent to the client: its requests give back their rows and wait."""


class ReleaseClient(msgspec.Struct, frozen=True, array_like=True, tag=121):
    """The client reads again."""


class SetClientWeight(msgspec.Struct, frozen=True, array_like=True, tag=122):
    """A client has come whose name has a weight."""

    weight: float


class RenewKVEvents(msgspec.Struct, frozen=True, array_like=True, tag=123):
    """KV events for the client were dropped: it gets everything that is cached, anew."""


class EndPause(msgspec.Struct, frozen=True, array_like=True, tag=124):
    """The engine drains: a pause would keep requests waiting for ever."""


#: What the border lets through to the engine; requests have been validated by then.
EngineInput: TypeAlias = (
    AddRequest | Abort | Goodbye | ClientCall | HoldClient | ReleaseClient | SetClientWeight | RenewKVEvents | EndPause
)
EngineReply: TypeAlias = Outputs | RequestFailed | Statistics | Explanation | KVEvents | CallDone | CallFailed
