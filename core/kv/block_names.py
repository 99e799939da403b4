"""BlockNames: which KV block has which content. The names form a radix tree, stored as columns.

Every distinct content (a block's tokens and all tokens before them) gets a number when a block first holds it. A block
is found under (number of the content before it, its tokens). The block found is compared with both, so a collision of
the 64-bit keys costs a missed hit and never gives a wrong one: the names are exact without cryptography. There is no
hash chain, so a few column operations name one block per row, whatever the number of rows.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from core.kv.beside import Beside
from core.kv.event_log import KVEventLog
from ipc.tables.arrays import NO_INT32S, BlockIds, Int32s, Ints, TokenIds, UInt64s

#: Content number of a block without a name. Block contents have positive numbers, roots (ipc/wire/block_roots.py)
#: negative ones.
UNNAMED = 0

_MASK = 2**64 - 1
_ONE = np.uint64(1)
_ODD_CONTENT = 0x9E3779B97F4A7C15  # 2^64 / golden ratio
_ODD_FINAL = 0xD6E8FEB86659FD93  # multiplier of the "rrmxmx" finalizer (Pelle Evensen)


@lru_cache(maxsize=8)
def _powers(block_size: int) -> UInt64s:
    return np.cumprod(np.full(block_size, _ODD_FINAL, np.uint64), dtype=np.uint64)


def hash_blocks(token_ids: TokenIds) -> UInt64s:
    """Return a hash, uint64 [n], of each row of token_ids [n, block_size]. It is the same in every process."""
    hashes: UInt64s = (token_ids.astype(np.uint64) + _ONE) @ _powers(token_ids.shape[1])
    return hashes


class BlockNames:
    """The names of all KV blocks.

    content [num_blocks] int64: number of the content of each block, or UNNAMED. block_of_key: the block for each lookup
    key; callers may only test whether a key is present. beside: what belongs to the named blocks, one for each further
    kind of layer.
    """

    def __init__(self, num_blocks: int, block_size: int, beside: tuple[Beside, ...] = ()) -> None:
        self.block_size = block_size
        self.beside = beside
        self.content = np.zeros(num_blocks, np.int64)
        self.events: KVEventLog | None = None  # set while a client follows
        self._parent = np.zeros(num_blocks, np.int64)
        self._key = np.zeros(num_blocks, np.uint64)
        self._tokens = np.zeros((num_blocks, block_size), np.int32)
        self.block_of_key: dict[int, int] = {}
        self._num_contents = 0

    def __len__(self) -> int:
        """Return the number of blocks that can be found."""
        return len(self.block_of_key)

    def parts(self) -> dict[str, Any]:
        """Return only the columns, for a snapshot (core/capture/snapshot.py): the keys can be computed from them."""
        return {name: part for name, part in self.__dict__.items() if name != "block_of_key"}

    def set_parts(self, parts: dict[str, Any]) -> None:
        """Load the state that parts() returned."""
        self.__dict__.update(parts)
        named = np.flatnonzero(self.content != UNNAMED)
        self.block_of_key = dict(zip(self._key[named].tolist(), named.tolist(), strict=True))

    def find(self, root: int, token_ids: TokenIds, hashes: list[int]) -> tuple[Int32s, int]:
        """Find the blocks of the longest known run of token_ids [n, block_size] from the start.

        hashes: one per block. Returns the blocks and the content number of the last one.
        """
        content, found, contents = root, [], [root]
        for value in hashes:
            block = self.block_of_key.get(block_key(content, value))
            if block is None:
                break
            content = int(self.content[block])
            found.append(block)
            contents.append(content)
        if not found:
            return NO_INT32S, root
        blocks = np.array(found, np.int32)
        right = (self._parent[blocks] == contents[:-1]) & (self._tokens[blocks] == token_ids[: len(found)]).all(1)
        if not right.all():
            blocks = blocks[: int(right.argmin())]
        return blocks, contents[len(blocks)]

    def name(self, blocks: Int32s, parents: Ints, token_ids: TokenIds) -> Ints:
        """Name one block for each of several rows.

        parents [n]: contents before the blocks; token_ids [n, block_size]: tokens in the blocks. Returns the contents
        [n]. The first block of a content keeps the name, because block tables are append-only.
        """
        contents = self.new_contents(len(blocks))
        owners = self._enter(blocks, contents, parents, token_ids)
        if owners is not None:
            old = (owners != blocks).nonzero()[0]
            same = self._parent[owners[old]] == parents[old]
            same &= (self._tokens[owners[old]] == token_ids[old]).all(1)
            contents[old[same]] = self.content[owners[old[same]]]
        return contents

    def name_runs(self, blocks: Int32s, lengths: Ints, parents: Ints, token_ids: TokenIds) -> Ints:
        """Name consecutive blocks of several requests. No block may have any of these contents yet.

        Request i gets the next lengths[i] > 0 of blocks [n], after the content parents[i]; token_ids [n, block_size].
        Returns the content of each request's last block.

        The first block of a run has a new content, so the contents after it are new too. Their numbers count up.
        """
        ends = lengths.cumsum()
        contents = self.new_contents(len(blocks))
        before = contents - 1
        before[ends - lengths] = parents
        self._enter(blocks, contents, before, token_ids)
        lasts: Ints = contents[ends - 1]
        return lasts

    def new_contents(self, count: int) -> Ints:
        """Return `count` numbers of contents that no block has had."""
        self._num_contents += count
        return np.arange(self._num_contents + 1 - count, self._num_contents + 1)

    def _enter(self, blocks: Int32s, contents: Ints, parents: Ints, token_ids: TokenIds) -> Ints | None:
        """Enter the blocks under their keys. Return None if all were entered, otherwise the owner of each key [n].

        The block entered first keeps the name. Other blocks with its content are not entered.
        """
        keys, numbers = block_keys(parents.view(np.uint64), hash_blocks(token_ids)), blocks.tolist()
        all_blocks, all_parents, all_token_ids = blocks, parents, token_ids
        blocks = blocks.astype(np.int64)  # makes writing the columns five times as fast
        holders = list(map(self.block_of_key.setdefault, keys.tolist(), numbers))
        owners = None if holders == numbers else np.array(holders, np.int64)
        if owners is not None:
            new = owners == blocks
            blocks, contents, parents, keys, token_ids = (
                column[new] for column in (blocks, contents, parents, keys, token_ids)
            )
        self.content[blocks] = contents
        self._parent[blocks] = parents
        self._key[blocks] = keys
        self._tokens[blocks] = token_ids
        if self.events is not None:
            self.events.stored(contents, parents, token_ids)
        for beside in self.beside:
            if owners is None:
                beside.let_find(blocks, blocks)
            else:
                beside.let_find(*self._same_content(all_blocks, all_parents, all_token_ids, owners))
        return owners

    def _same_content(self, blocks: Int32s, parents: Ints, token_ids: TokenIds, owners: Ints) -> tuple[Int32s, Ints]:
        """Return the blocks that have the same content as the owners [n] of their keys, and these owners."""
        same = (self._parent[owners] == parents) & (self._tokens[owners] == token_ids).all(1)
        return blocks[same], owners[same]

    def name_run(self, blocks: Int32s, parent: int, token_ids: TokenIds, hashes: list[int]) -> int:
        """Name consecutive blocks of one row, and return the content of the last one.

        token_ids [n, block_size]; hashes: one per block. This runs once per event in plain Python, which is cheaper
        than columns for the few blocks of a prompt.
        """
        content, enter = parent, self.block_of_key.setdefault
        for index, (block, value) in enumerate(zip(blocks.tolist(), hashes, strict=True)):
            key = block_key(content, value)
            owner = enter(key, block)
            if owner != block and self._holds(owner, content, token_ids[index]):
                content = int(self.content[owner])
                continue
            self._num_contents += 1
            if owner == block:
                self.content[block] = self._num_contents
                self._parent[block] = content
                self._key[block] = key
                self._tokens[block] = token_ids[index]
                if self.events is not None:
                    self.events.stored(self.content[[block]], self._parent[[block]], token_ids[index])
            content = self._num_contents
        for beside in self.beside:
            found, _ = self.find(parent, token_ids, hashes)
            beside.let_find(blocks[: len(found)], found)
        return content

    def described(self, blocks: BlockIds) -> tuple[UInt64s, Ints, Int32s]:
        """Return (keys [n], parents [n], token_ids [n, block_size]) of named blocks."""
        return self._key[blocks], self._parent[blocks], self._tokens[blocks]

    def adopt(self, blocks: BlockIds, contents: Ints, keys: UInt64s, parents: Ints, token_ids: TokenIds) -> None:
        """Name blocks [n] that have contents named earlier, as described() returned them.

        A block whose key is taken gets no name.
        """
        numbers = blocks.tolist()
        new = np.array([self.block_of_key.setdefault(*one) for one in zip(keys.tolist(), numbers, strict=True)])
        new = (new == blocks).nonzero()[0]
        blocks, contents, parents = blocks[new].astype(np.int64), contents[new], parents[new]
        self.content[blocks], self._parent[blocks] = contents, parents
        self._key[blocks], self._tokens[blocks] = keys[new], token_ids[new]
        if self.events is not None:
            self.events.stored(contents, parents, token_ids[new])

    def forget(self, blocks: BlockIds) -> None:
        """Remove the names of these blocks, all of which have one.

        They and what belongs to them can no longer be found.
        """
        for beside in self.beside:
            beside.forget(blocks)
        if self.events is not None:
            self.events.removed(self.content[blocks])
        for key in self._key[blocks].tolist():
            del self.block_of_key[key]
        self.content[blocks] = UNNAMED

    def forget_all(self) -> None:
        """Remove the names of all blocks."""
        if self.events is not None:
            self.events.cleared()
        self.block_of_key.clear()
        self.content[:] = UNNAMED
        for beside in self.beside:
            beside.forget_all()

    def blank_rest(self) -> None:
        """Clear the columns of blocks without a name, and make no block findable until it is renamed."""
        unnamed = self.content == UNNAMED
        self._tokens[unnamed] = self._parent[unnamed] = self._key[unnamed] = 0
        self.block_of_key.clear()

    def rename(self, block: int, parent: int, token_ids: Int32s) -> None:
        """Give a block that cannot be found another parent and other tokens, which it can be found by from now on."""
        key = block_key(parent, int(hash_blocks(token_ids[None])[0]))
        self._parent[block], self._tokens[block], self._key[block] = parent, token_ids, key
        self.block_of_key.setdefault(key, block)

    def columns(self) -> tuple[Ints, Ints, Int32s]:
        """Return (contents [n], parents [n], token_ids [n, block_size]) of all blocks that can be found.

        Parents come first, because a content gets its number after the one before it.
        """
        named = np.flatnonzero(self.content != UNNAMED)
        named = named[np.argsort(self.content[named])]
        return self.content[named], self._parent[named], self._tokens[named]

    def _holds(self, block: int, parent: int, token_ids: TokenIds) -> bool:
        return int(self._parent[block]) == parent and bool((self._tokens[block] == token_ids).all())

    def check_integrity(self) -> None:
        """Raise AssertionError if a name does not lead to its block or does not match what the block holds."""
        expected = _findable(self.content.tobytes(), self._parent.tobytes(), self._tokens.tobytes(), self.block_size)
        odd = dict(expected.items() ^ self.block_of_key.items()) if expected != self.block_of_key else {}
        assert not odd, f"blocks {sorted(odd.values())[:8]} are not found under their names, or found without one"
        for beside in self.beside:
            beside.check_integrity(self.content)


@lru_cache(maxsize=4)  # tests check after every step, and most steps change no name
def _findable(contents: bytes, parents: bytes, token_ids: bytes, block_size: int) -> dict[int, int]:
    """Return the block for each lookup key, from all columns. Errors: AssertionError if two have one content or key."""
    content = np.frombuffer(contents, np.int64)
    named = np.flatnonzero(content != UNNAMED)
    assert len(set(content[named].tolist())) == len(named), "two blocks have one content number"
    tokens = np.frombuffer(token_ids, np.int32).reshape(len(content), block_size)[named]
    keys = block_keys(np.frombuffer(parents, np.uint64)[named], hash_blocks(tokens))
    findable = dict(zip(keys.tolist(), named.tolist(), strict=True))
    assert len(findable) == len(named), "two blocks have one key"
    return findable


def block_key(content: int, value: int) -> int:
    """Return the lookup key of a block from its token hash and the preceding content number."""
    mixed = ((content * _ODD_CONTENT + value) * _ODD_FINAL) & _MASK
    return mixed ^ (mixed >> 32)


def block_keys(contents: UInt64s, values: UInt64s) -> UInt64s:
    """Return the lookup keys of many blocks [n], as block_key() does. Products of columns wrap at 64 bits."""
    mixed: Any = (contents * _ODD_CONTENT + values) * _ODD_FINAL  # numpy's stubs type >> 32 as signed
    keys: UInt64s = mixed ^ (mixed >> 32)
    return keys


def rename_blocks(
    places: Sequence[BlockNames], root: Callable[[int], int], tokens: Callable[[int, int, Int32s], Int32s]
) -> None:
    """Give the blocks of all these places other tokens, parents before children.

    A content may be in several places, and its parent in another one. root: maps a root to its new number. tokens: maps
    (content, new parent, tokens) of a block to its new tokens.
    """
    found: dict[int, tuple[int, Int32s]] = {}  # by content: parent and tokens
    holders: dict[int, list[tuple[BlockNames, int]]] = {}  # by content: (place, block) of each occurrence
    for names in places:
        for content, parent, token_ids in zip(*names.columns(), strict=True):
            found[int(content)] = int(parent), token_ids
        for block in np.flatnonzero(names.content != UNNAMED).tolist():
            holders.setdefault(int(names.content[block]), []).append((names, block))
        names.blank_rest()
    for content in sorted(found):
        parent, token_ids = found[content]
        parent = root(parent) if parent < 0 else parent
        new = tokens(content, parent, token_ids)
        for names, block in holders[content]:
            names.rename(block, parent, new)
