"""BlockPool: which KV blocks are free, held, or free with their content still cached.

Columns are indexed by block id. Every operation takes arrays and returns int64, because indexing with int32 takes NumPy
five times as long. Blocks without a name (`blank`) are allocated first. Then blocks of the prefix cache are evicted:
those of the least urgent last user first, and among them the least recently freed.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from core.kv.block_names import UNNAMED, BlockNames
from core.kv.block_ring import BlockRing
from ipc.tables.arrays import NO_INTS, BlockIds, Bools, Ints

NULL_BLOCK = 0
_NO_FENCE = -1
_NULL_TABLE = np.array([NULL_BLOCK])  # who holds it


class Tier(Protocol):
    """What keeps copies of blocks that the pool evicts."""

    def keep(self, blocks: BlockIds) -> None:
        """Take blocks that are being evicted and still have their names."""

    def forget(self) -> None:
        """Forget all blocks."""

    def forget_contents(self, contents: Ints) -> None:
        """Forget the blocks with these content numbers; UNNAMED among them stands for none."""


class BlockPool:
    """The pool of blocks 1..num_blocks-1. Block 0 is the null block, which is never allocated.

    A block is in exactly one state: held (ref_count > 0), blank, cached (in a ring), or fenced (freed while a step that
    touches it is in flight; free after that step's update).

    num_rings: how many classes of urgency the prefix cache distinguishes. urgency [num_blocks] int8: the ring in which
    a block belongs, 0 = evicted first; the owner sets it before free().
    """

    def __init__(self, num_blocks: int, block_size: int, num_rings: int = 1, names: BlockNames | None = None) -> None:
        assert num_blocks >= 2, f"a pool needs the null block and one more, got {num_blocks}"
        self.num_blocks = num_blocks
        self.ref_count = np.zeros(num_blocks, np.int32)
        self.ref_count[NULL_BLOCK] = 1
        self.names = BlockNames(num_blocks, block_size) if names is None else names
        self._blank = np.arange(num_blocks - 1, 0, -1)  # a stack: the top is the end
        self._num_blank = num_blocks - 1
        self._rings = [BlockRing(num_blocks) for _ in range(num_rings)]
        self.urgency = np.zeros(num_blocks, np.int8)
        self.num_free = num_blocks - 1  # blocks that allocate() can hand out now: blank and cached
        self._place = np.zeros(num_blocks, np.int64)  # scratch: a block's last index among those freed
        self._fence_of = np.full(num_blocks, _NO_FENCE, np.int64)
        self._fenced: deque[tuple[int, Ints]] = deque()
        self.num_fenced = 0
        self.tiers: list[Tier] = []

    def parts(self) -> dict[str, Any]:
        """Return all but what is scratch, for a snapshot (core/capture/snapshot.py)."""
        return {**self.__dict__, "_place": None}

    def set_parts(self, parts: dict[str, Any]) -> None:
        """Become the pool with these parts."""
        self.__dict__.update(parts)
        self._place = np.zeros(self.num_blocks, np.int64)

    def allocate(self, count: int) -> Ints:
        """Allocate blocks [count] with ref_count 1. The caller has compared count with num_free."""
        assert count <= self.num_free, f"{count} blocks asked of {self.num_free} free"
        self.num_free -= count
        from_blank = min(count, self._num_blank)
        if from_blank:
            blocks: Ints = self._blank[self._num_blank - from_blank : self._num_blank][::-1].copy()
            self._num_blank -= from_blank
            if from_blank < count:
                blocks = np.concatenate([blocks, self._evict(count - from_blank)])
        else:
            blocks = self._evict(count)
        self.ref_count[blocks] = 1
        return blocks

    def next_evicted(self, count: int) -> Ints:
        """Return which cached blocks allocate(count) would evict now, in their order."""
        parts, missing = [NO_INTS], max(0, count - self._num_blank)
        for ring in self._rings:
            parts.append(ring.first(missing))
            missing -= len(parts[-1])
        return np.concatenate(parts)

    def num_revived(self, blocks: BlockIds) -> int:
        """Return how many of these found blocks are free now and would leave the free lists when held."""
        return self._num_in_rings(blocks)

    def hold(self, blocks: BlockIds) -> None:
        """Add one reference to found blocks. Call this before any allocation, which might evict them."""
        self._revive(blocks)
        self.ref_count[blocks] += 1

    def _num_in_rings(self, blocks: BlockIds) -> int:
        return sum(int(np.count_nonzero(ring.holds(blocks))) for ring in self._rings)

    def _revive(self, blocks: BlockIds) -> None:
        """Take these blocks out of the free lists."""
        self.num_free -= self._num_in_rings(blocks)
        self.num_fenced -= int(np.count_nonzero(self._fence_of[blocks] != _NO_FENCE))
        for ring in self._rings:
            ring.discard(blocks)
        self._fence_of[blocks] = _NO_FENCE

    def free(self, blocks: BlockIds, fence: int | None) -> None:
        """Drop one reference to each of these blocks, in this order: give a request's tail first.

        fence: the last step in flight that may touch them, None when there is none.
        """
        released: Ints = blocks.astype(np.int64, copy=False)
        if np.count_nonzero(self.ref_count[released] == 1) == len(released):
            self.ref_count[released] = 0
        else:
            released = self._drop(released)
        if fence is None:
            self._make_free(released)
        elif len(released):
            self._fence_of[released] = fence
            self._fenced.append((fence, released))
            self.num_fenced += len(released)

    def _drop(self, blocks: BlockIds) -> Ints:
        """Subtract one reference from each block; return the blocks that have none left."""
        places = np.arange(len(blocks))
        self._place[blocks] = places
        last = self._place[blocks] == places
        np.subtract.at(self.ref_count, blocks, 1)
        blocks = blocks[last]  # a block shared by requests that end together is released with the last one
        counts = self.ref_count[blocks]
        assert not len(blocks) or counts.min() >= 0, f"freed twice: {blocks[counts < 0]}"
        released: Ints = blocks[counts == 0]
        return released

    def set_urgency(self, blocks: BlockIds, urgency: Ints) -> None:
        """Set the ring in which each of these blocks belongs, before free()."""
        self.urgency[blocks] = urgency

    def lift_fences(self, step: int) -> None:
        """Free the blocks fenced by this step, whose update is done."""
        while self._fenced and self._fenced[0][0] <= step:
            fence, blocks = self._fenced.popleft()
            lifted = blocks[self._fence_of[blocks] == fence]  # the others were revived meanwhile
            self._fence_of[lifted] = _NO_FENCE
            self.num_fenced -= len(lifted)
            self._make_free(lifted)

    def forget(self) -> None:
        """Empty the prefix cache: free cached blocks become blank, held blocks lose their names."""
        self.names.forget_all()
        for tier in self.tiers:
            tier.forget()
        for ring in self._rings:
            self._push_blank(ring.clear())

    def forget_names(self, blocks: BlockIds) -> None:
        """Remove the names of these held blocks, so that they are not found any more."""
        for tier in self.tiers:
            tier.forget_contents(self.names.content[blocks])
        self.names.forget(blocks[self.names.content[blocks] != UNNAMED])

    def _make_free(self, blocks: BlockIds) -> None:
        self.num_free += len(blocks)
        named = self._is_named(blocks)
        self._push_blank(blocks[~named])
        blocks = blocks[named]
        if len(self._rings) == 1:
            self._rings[0].push(blocks)
            return
        urgency = self.urgency[blocks]
        for number, ring in enumerate(self._rings):
            ring.push(blocks[urgency == number])

    def _is_named(self, blocks: BlockIds) -> Bools:
        """Return which of these blocks can be found by their content, bool [n]."""
        named: Bools = self.names.content[blocks] != UNNAMED
        return named

    def _forget(self, blocks: BlockIds) -> None:
        """Remove the names of evicted blocks."""
        self.names.forget(blocks)

    def _push_blank(self, blocks: BlockIds) -> None:
        self._blank[self._num_blank : self._num_blank + len(blocks)] = blocks
        self._num_blank += len(blocks)

    def _evict(self, count: int) -> Ints:
        """Take the first cached blocks in the order of eviction and remove their names."""
        parts = []
        for ring in self._rings:
            parts.append(ring.pop(min(count, len(ring))))
            count -= len(parts[-1])
        assert not count, f"{count} blocks missing from the rings"
        evicted = parts[0] if len(parts) == 1 else np.concatenate(parts)
        for tier in self.tiers:
            tier.keep(evicted)
        self._forget(evicted)
        return evicted

    def check_integrity(self, tables: Sequence[BlockIds]) -> None:
        """Recount all states from scratch against the block tables of all rows. AssertionError with the numbers."""
        rings = [ring.check_integrity() for ring in self._rings]
        free = np.concatenate([self._blank[: self._num_blank], *rings])
        assert self.num_free == len(free), f"{self.num_free} free, {self._num_blank} blank, in the rings {rings}"
        held = np.concatenate([_NULL_TABLE, *tables])
        num_fenced = _recount(free.tobytes(), held.tobytes(), self.ref_count.tobytes(), self._fence_of.tobytes())
        assert self.num_fenced == num_fenced, f"{self.num_fenced} fenced, {num_fenced} found"
        self.names.check_integrity()
        named = self._is_named(free)
        assert not np.count_nonzero(named[: self._num_blank]), "a blank block has a name"
        assert np.count_nonzero(named) == len(free) - self._num_blank, "a block without a name is in a ring"


@lru_cache(maxsize=4)  # tests check after each step, and every second step changes none of these
def _recount(free_blocks: bytes, tables: bytes, ref_counts: bytes, fences: bytes) -> int:
    """Check that each block is free, held as often as the tables say, or fenced; return how many are fenced."""
    free, ref_count = np.frombuffer(free_blocks, np.int64), np.frombuffer(ref_counts, np.int32)
    owners = np.bincount(np.frombuffer(tables, np.int64), minlength=len(ref_count))
    if np.count_nonzero(owners != ref_count):
        wrong = np.flatnonzero(owners != ref_count)[:8]
        raise AssertionError(f"blocks {wrong}: {owners[wrong]} owners, ref_count {ref_count[wrong]}")
    held, fenced = owners.nonzero()[0], (np.frombuffer(fences, np.int64) != _NO_FENCE).nonzero()[0]
    places = np.concatenate([free, held, fenced]).tolist()
    if sorted(places) != list(range(len(ref_count))):  # each block is in one state, and there once
        states = {"free": free, "held": held, "fenced": fenced}
        odd = [block for block in range(len(ref_count)) if places.count(block) != 1][:8]
        found = {block: [name for name, state in states.items() if block in state] for block in odd}
        raise AssertionError(f"blocks in no state, in several, or in one twice: {found}")
    return len(fenced)
