"""PrefixIndex: which replica has which prefixes in its prefix cache, from its KV events.

A block's key is a 64-bit hash of all tokens up to its end and of their root (ipc/wire/block_roots.py). A key is
key(before) * M + hash(tokens) modulo 2**64, with M odd: a stored block's key follows from its parent's by one
multiplication, and all keys of a prompt from one sum over columns. Two contents with one key cost a longer prefill,
never a wrong answer: the replica compares the tokens themselves.
"""

from collections.abc import Iterator, Sequence
from operator import mul
from struct import unpack_from

import numpy as np

from ipc.tables.arrays import Ints, UInt64s
from ipc.wire.kv_events import KVBlocksCleared, KVBlocksRemoved, KVBlocksStored, KVEvent

_ODD = 0x9E3779B97F4A7C15  # the fractional part of the golden ratio, which is odd
_MASK = 2**64 - 1
_FIRST_POWERS = 64
#: Number of a prompt's blocks whose keys are computed one by one, as long as they are cached. Arrays take longer for so
#: few.
_FEW_BLOCKS = 6


class PrefixIndex:
    """The views of all replicas' caches. replica: a small number, from 0.

    It grows only as large as the caches: a block that a replica reuses is removed, and one whose parent is unknown is
    left out.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, _Blocks] = {}  # by tokens in a block

    def apply(self, replica: int, events: Sequence[KVEvent]) -> None:
        """Apply the events of one replica, in order. Errors: ValueError for columns that do not fit each other."""
        for event in events:
            match event:
                case KVBlocksStored():
                    blocks = self._by_size.get(event.block_size)
                    if blocks is None:
                        if event.block_size < 1:
                            raise ValueError(f"blocks of {event.block_size} tokens")
                        blocks = self._by_size[event.block_size] = _Blocks(event.block_size)
                    blocks.store(replica, event)
                case KVBlocksRemoved(contents):
                    for blocks in self._by_size.values():
                        blocks.remove(replica, np.frombuffer(contents, "<i8").tolist())
                case KVBlocksCleared():
                    self.forget(replica)

    def forget(self, replica: int) -> None:
        """Drop a replica's cached blocks."""
        for blocks in self._by_size.values():
            blocks.forget(replica)

    def match(self, root: int, token_ids: bytes) -> dict[int, int]:
        """Return how many tokens of a prompt each replica has cached, for those that have any.

        token_ids: int32, little-endian. The last token is always computed, so the block that it ends does not count.
        """
        found: dict[int, int] = {}
        for blocks in self._by_size.values():
            found |= blocks.match(root, token_ids)
        return found

    def num_blocks(self, replica: int) -> int:
        """Return the number of blocks in the view of a replica's cache."""
        return sum(len(blocks.keys_of.get(replica, ())) for blocks in self._by_size.values())


class _Blocks:
    """Blocks of one size."""

    def __init__(self, block_size: int) -> None:
        self.keys_of: dict[int, dict[int, int]] = {}  # by replica: content number -> key
        self._size = block_size
        self._holders: dict[int, int] = {}  # key -> bit mask of replicas
        self._factor = pow(_ODD, block_size, 2**64)  # M
        self._weights = np.array([pow(_ODD, block_size - 1 - k, 2**64) for k in range(block_size)], np.uint64)
        self._of_zeros = self._weights.sum(dtype=np.uint64)  # a token counts as its id + 1, so that token 0 matters
        self._format = f"<{block_size}i"
        self._first_weights: list[int] = self._weights.tolist()
        self._zeros = int(self._of_zeros)
        self._grow(_FIRST_POWERS)

    def _grow(self, count: int) -> None:
        """Extend the powers of M, and of its inverse, to `count`."""
        inverse = pow(self._factor, -1, 2**64)
        self._powers = np.array([pow(self._factor, k, 2**64) for k in range(count + 1)], np.uint64)
        self._inverses = np.array([pow(inverse, k, 2**64) for k in range(count + 1)], np.uint64)

    def _hashes(self, token_ids: bytes, count: int) -> UInt64s:
        """Return the hash [count] of each block's own tokens."""
        ids = np.frombuffer(token_ids, "<i4", count * self._size).astype(np.uint64)
        hashes: UInt64s = ids.reshape(count, self._size) @ self._weights + self._of_zeros
        return hashes

    def keys(self, root: int, token_ids: bytes, count: int) -> list[int]:
        """Return the keys of a prompt's first `count` blocks."""
        if count >= len(self._powers):
            self._grow(2 * count)
        terms = (self._hashes(token_ids, count) * self._inverses[1 : count + 1]).cumsum(dtype=np.uint64)
        keys: list[int] = ((terms + np.uint64(_root_key(root))) * self._powers[1 : count + 1]).tolist()
        return keys

    def _keys_in_turn(self, root: int, token_ids: bytes, count: int) -> Iterator[int]:
        """Yield the keys of a prompt's first `count` blocks, computed one at a time."""
        key, weights, factor = _root_key(root), self._first_weights, self._factor
        for at in range(0, 4 * self._size * count, 4 * self._size):
            own: int = sum(map(mul, unpack_from(self._format, token_ids, at), weights)) + self._zeros
            key = (key * factor + own) & _MASK
            yield key

    def match(self, root: int, token_ids: bytes) -> dict[int, int]:
        count = (len(token_ids) // 4 - 1) // self._size
        if count < 1 or not self._holders:
            return {}
        holders, keys = self._holders.get, self._keys_in_turn(root, token_ids, count)
        mask = holders(next(keys), 0)
        if not mask:  # as for most new prompts
            return {}
        found, depth = dict[int, int](), 1
        for key in keys if count <= _FEW_BLOCKS else self.keys(root, token_ids, count)[1:]:
            here = mask & holders(key, 0)
            if here != mask:
                _note(found, mask & ~here, depth * self._size)
                mask = here
                if not mask:
                    return found
            depth += 1
        _note(found, mask, depth * self._size)
        return found

    def store(self, replica: int, event: KVBlocksStored) -> None:
        contents, parents = _contents(event.contents), _contents(event.parents)
        if len(contents) != len(parents) or len(event.token_ids) != 4 * self._size * len(contents):
            raise ValueError(
                f"{len(contents)} blocks of {self._size} tokens with {len(parents)} parents and "
                f"{len(event.token_ids)} bytes of tokens"
            )
        keys, holders, bit, factor = self.keys_of.setdefault(replica, {}), self._holders, 1 << replica, self._factor
        for content, parent, own in zip(
            contents.tolist(), parents.tolist(), self._hashes(event.token_ids, len(contents)).tolist(), strict=True
        ):
            before = _root_key(parent) if parent < 0 else keys.get(parent)
            if before is not None:
                keys[content] = key = (before * factor + own) & _MASK
                holders[key] = holders.get(key, 0) | bit

    def remove(self, replica: int, contents: list[int]) -> None:
        keys = self.keys_of.get(replica, {})
        for content in contents:
            if (key := keys.pop(content, None)) is not None:
                self._drop(key, replica)

    def forget(self, replica: int) -> None:
        for key in self.keys_of.pop(replica, {}).values():
            self._drop(key, replica)

    def _drop(self, key: int, replica: int) -> None:
        left = self._holders.get(key, 0) & ~(1 << replica)
        if left:
            self._holders[key] = left
        else:
            self._holders.pop(key, None)


def _contents(column: bytes) -> Ints:
    return np.frombuffer(column, "<i8")


def _root_key(root: int) -> int:
    return (root * _ODD) & _MASK


def _note(found: dict[int, int], mask: int, num_tokens: int) -> None:
    while mask:
        low = mask & -mask
        found[low.bit_length() - 1] = num_tokens
        mask ^= low
