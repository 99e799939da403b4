"""The messages by which an engine reads and writes the KV blocks and states of a worker whose memory it cannot map.

They have a channel of their own: a thread of the worker answers next to its steps. The engine asks one question at a
time.
"""

from typing import Literal, TypeAlias

import msgspec

from ipc.errors import MalformedMessageError
from ipc.wire.messages import DECODE_ERRORS

#: The memories of SharedBlocks.
MemoryName: TypeAlias = Literal["cache", "host", "states"]


class ReadBlocks(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """Ask for the bytes of these blocks. Answer: their bytes, block after block."""

    memory: MemoryName
    blocks: list[int]


class WriteBlocks(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Write these blocks. content: their bytes, block after block. Answer: no bytes."""

    memory: MemoryName
    blocks: list[int]
    content: bytes


class SettleBlocks(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """Wait until so many plans have been run. Answer: no bytes."""

    num_plans: int


BlockQuestion: TypeAlias = ReadBlocks | WriteBlocks | SettleBlocks

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[BlockQuestion] = msgspec.msgpack.Decoder(BlockQuestion)


def encode_block_question(question: BlockQuestion) -> bytes:
    """Return the question as msgpack."""
    return _encoder.encode(question)


def decode_block_question(frame: bytes) -> BlockQuestion:
    """Return the engine's question. Errors: MalformedMessageError."""
    try:
        return _decoder.decode(frame)
    except DECODE_ERRORS as error:
        raise MalformedMessageError(f"not a question about a worker's blocks: {error}") from error
