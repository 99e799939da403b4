"""The events for a client that follows the prefix cache: see docs/scheduling.md."""

from typing import TypeAlias

import msgspec


class KVBlocksStored(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Blocks that requests can find from now on."""

    contents: bytes  # int64[n] the number of each block's content; a number is never used twice
    parents: bytes  # int64[n] the content before it; negative: the beginning of a prompt, -1 without cache_salt
    token_ids: bytes  # int32[n * block_size]
    block_size: int


class KVBlocksRemoved(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Blocks that were reused for other content and can no longer be found."""

    contents: bytes  # int64[n]


class KVBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The prefix cache is empty."""


KVEvent: TypeAlias = KVBlocksStored | KVBlocksRemoved | KVBlocksCleared
