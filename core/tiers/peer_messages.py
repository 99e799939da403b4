"""The messages between engines of which one fetches KV blocks from the other.

The asker has a DEALER, the other a ROUTER. An answer has the number of its question; BlocksSent is followed by a frame
for each of its blocks, as core/tiers/block_file.py packs them.
"""

from typing import TypeAlias

import msgspec

from core.tiers.portable_names import NAME_BYTES

#: Most blocks of one GetBlocks.
MAX_BLOCKS = 8
#: Most blocks of one FindBlocks.
MAX_NAMES = 1 << 16


class FindBlocks(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Say how many of these blocks, from the first on, are there. Answer: BlocksHere. names: NAME_BYTES each."""

    number: int
    names: bytes


class GetBlocks(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Send these blocks, at most MAX_BLOCKS, up to the first that is not there. Answer: BlocksSent."""

    number: int
    names: bytes


class BlocksHere(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The first `count` of the blocks are here. They may go before they are asked for."""

    number: int
    count: int


class BlocksSent(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The first `count` of the blocks follow, in frames of their own."""

    number: int
    count: int


Question: TypeAlias = FindBlocks | GetBlocks
Answer: TypeAlias = BlocksHere | BlocksSent

encode = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder(Question).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def split_names(names: bytes) -> list[bytes]:
    """Return the names one by one; none where the length is no multiple of a name's."""
    if len(names) % NAME_BYTES:
        return []
    return [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]
