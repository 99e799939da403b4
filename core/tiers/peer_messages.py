"""The messages between engines when one fetches KV blocks from another.

The client has a DEALER, the server a ROUTER. An answer has the number of its question. BlocksSent is followed by one
frame per block, packed as in core/tiers/block_file.py.
"""

from typing import TypeAlias

import msgspec

from core.tiers.portable_names import NAME_BYTES

#: The most blocks in a GetBlocks.
MAX_BLOCKS = 8
#: The most blocks in a FindBlocks.
MAX_NAMES = 1 << 16


class FindBlocks(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Ask how many of these blocks, from the first on, are there. Answer: BlocksHere. names: NAME_BYTES each."""

    number: int
    names: bytes


class GetBlocks(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Request these blocks, at most MAX_BLOCKS, up to the first that is missing. Answer: BlocksSent."""

    number: int
    names: bytes


class BlocksHere(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The first `count` of the blocks are here. They may be gone before they are requested."""

    number: int
    count: int


class BlocksSent(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The first `count` of the blocks follow, one frame each."""

    number: int
    count: int


Question: TypeAlias = FindBlocks | GetBlocks
Answer: TypeAlias = BlocksHere | BlocksSent

encode = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder(Question).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def split_names(names: bytes) -> list[bytes]:
    """Split the names. Return none if the length is not a multiple of a name's."""
    if len(names) % NAME_BYTES:
        return []
    return [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]
