"""The messages between an engine and other machines that run workers for its executor.

A machine is called a node here; node 0 is the engine's own. A node asks to join, reports which files of the engine's
model it has, and is told which workers to start. Bytes has a second frame: a piece of a stream
(core/workers/carrier.py).
"""

from typing import TypeAlias

import msgspec

from core.workers.wires import Place
from ipc.errors import MalformedMessageError
from ipc.options.config import EngineConfig
from ipc.wire.messages import DECODE_ERRORS

#: Seconds between two heartbeats, and the time without one after which an engine or node counts as gone. This is less
#: than the time after which a step counts as hung (core/workers/step_clock.py).
BEAT_S = 0.25
SILENCE_S = 2.5


class Join(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The node wants to run workers. version: of this package. node: its number; 0 = any. Answer: Describe, Refused.

    It repeats this every second until it is answered, because all places may be taken.
    """

    version: str
    host: str
    node: int = 0


class Describe(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Ask for the fingerprint of the node's model files. node: the node's number. Answer: Described."""

    config: EngineConfig
    node: int


class Described(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The fingerprint of the node's model files; "" if it needs none. error: why there is none."""

    fingerprint: str
    error: str = ""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The node cannot join this engine, and ends."""

    text: str


class Start(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Start the node's workers for a crew, and end those of the previous crew. Answer: Started, or Ended for each."""

    crew: int
    config: EngineConfig
    places: list[Place]


class Started(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The workers' process ids, by worker number."""

    crew: int
    pids: dict[int, int]


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """A worker has ended. text: how, to follow "worker 1 (4711)"."""

    crew: int
    number: int
    text: str


class Signal(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Send this signal to a worker, given by number."""

    crew: int
    number: int
    signal: int


class Bytes(msgspec.Struct, frozen=True, array_like=True, tag=9, gc=False):
    """The next bytes of a stream of a crew, in the next frame."""

    crew: int
    stream: int


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """A heartbeat."""


class Unknown(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """The engine does not know this node, or no longer. The node must end its workers and join again."""


ToNode: TypeAlias = Describe | Refused | Start | Signal | Bytes | Beat | Unknown
ToEngine: TypeAlias = Join | Described | Started | Ended | Bytes | Beat

_encoder = msgspec.msgpack.Encoder()
_to_node: msgspec.msgpack.Decoder[ToNode] = msgspec.msgpack.Decoder(ToNode)
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)


def encode(message: ToNode | ToEngine) -> bytes:
    """Return the message as msgpack."""
    return _encoder.encode(message)


def decode_to_node(frame: memoryview) -> ToNode:
    """Return an engine's message. Errors: MalformedMessageError."""
    try:
        return _to_node.decode(frame)
    except DECODE_ERRORS as error:
        raise MalformedMessageError(f"not a message of an engine to its nodes: {error}") from error


def decode_to_engine(frame: memoryview) -> ToEngine:
    """Return a node's message. Errors: MalformedMessageError."""
    try:
        return _to_engine.decode(frame)
    except DECODE_ERRORS as error:
        raise MalformedMessageError(f"not a message of a node: {error}") from error
