"""BlockPool: which KV blocks are free, held, or free with their content still cached.

The pool allocates pages of page_blocks blocks. A page is one block if all layers use the same block tables. Otherwise
it holds several blocks of the first kind of layer, or one block of another kind, which has the number of the page's
first block (core/models/layers/cache_pages.py). A page is held, free, cached or fenced as a whole. Columns are indexed
by page.

Every operation takes arrays and returns int64, because indexing with int32 takes NumPy five times as long. Pages
without findable content (`blank`) are allocated first. Then pages of the prefix cache are evicted: those of the least
urgent last user first, and among them the least recently freed.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import numpy as np

from core.kv.beside import Beside
from core.kv.block_names import UNNAMED, BlockNames
from core.kv.block_ring import BlockRing
from ipc.tables.arrays import NO_INTS, BlockIds, Bools, Int32s, Ints

NULL_BLOCK = 0
_NO_FENCE = -1
_Pages = TypeVar("_Pages", Ints, Int32s)
_NULL_TABLE = np.array([NULL_BLOCK])  # what holds it in check_integrity()


class Tier(Protocol):
    """A tier that keeps copies of blocks that the pool evicts."""

    def keep(self, pages: Ints) -> None:
        """Copy pages that are being evicted. Their blocks still have their names."""

    def forget(self) -> None:
        """Forget all blocks."""

    def forget_contents(self, contents: Ints) -> None:
        """Forget the blocks with these content numbers; UNNAMED means none."""


class BlockPool:
    """The pool of pages 1..num_blocks-1. Page 0 has the null block and is never allocated.

    allocate() returns pages. All other methods take and return block numbers as in the block tables, unless they say
    pages. A page is in exactly one state: held (ref_count > 0), blank, cached (in a ring), or fenced (freed while a
    step that uses it is in flight; free after that step's update). It counts one reference for each of its blocks in
    each table.

    num_others: number of further kinds of layers, whose blocks are pages. num_rings: number of urgency classes that the
    prefix cache distinguishes. urgency [num_blocks] int8: the ring in which a page belongs, 0 = evicted first; the
    owner sets it before free().
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_rings: int = 1, page_blocks: int = 1, num_others: int = 0
    ) -> None:
        assert num_blocks >= 2, f"a pool needs the null block and one more, got {num_blocks}"
        self.num_blocks = num_blocks
        self.page_blocks = page_blocks
        self.ref_count = np.zeros(num_blocks, np.int32)
        self.ref_count[NULL_BLOCK] = 1
        beside = tuple(Beside(num_blocks, page_blocks) for _ in range(num_others))
        self.names = BlockNames(num_blocks * page_blocks, block_size, beside)
        self._blank = np.arange(num_blocks - 1, 0, -1)  # a stack; its top is at the end
        self._num_blank = num_blocks - 1
        self._rings = [BlockRing(num_blocks) for _ in range(num_rings)]
        self.urgency = np.zeros(num_blocks, np.int8)
        self.num_free = num_blocks - 1  # pages that allocate() can hand out now: blank and cached
        self._place = np.zeros(num_blocks, np.int64)  # scratch: the last index of each page in the argument
        self._fence_of = np.full(num_blocks, _NO_FENCE, np.int64)
        self._fenced: deque[tuple[int, Ints]] = deque()
        self.num_fenced = 0
        self.tiers: list[Tier] = []

    def parts(self) -> dict[str, Any]:
        """Return everything except scratch arrays, for a snapshot (core/capture/snapshot.py)."""
        return {name: part for name, part in self.__dict__.items() if name != "_place"}

    def set_parts(self, parts: dict[str, Any]) -> None:
        """Load the state that parts() returned."""
        self.__dict__.update(parts)
        self._place = np.zeros(len(self.ref_count), np.int64)

    def inside(self, pages: BlockIds) -> Ints:
        """Return all blocks of these pages, page after page."""
        if self.page_blocks == 1:
            return pages.astype(np.int64, copy=False)
        blocks: Ints = np.add.outer(pages.astype(np.int64) * self.page_blocks, np.arange(self.page_blocks)).reshape(-1)
        return blocks

    def blocks_in(self, pages: _Pages) -> _Pages:
        """Return the blocks of allocated pages. A row takes all of them for the first kind of layer."""
        if self.page_blocks == 1 and not self.names.beside:
            return pages
        blocks = self.inside(pages).astype(pages.dtype, copy=False)
        self.ref_count[pages] = self.page_blocks
        for beside in self.names.beside:
            beside.filled[blocks] = NULL_BLOCK
        return blocks

    def allocate(self, count: int) -> Ints:
        """Allocate pages [count] with ref_count 1. The caller has compared count with num_free."""
        assert count <= self.num_free, f"{count} blocks requested, {self.num_free} free"
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
        """Return which cached pages allocate(count) would evict now, in that order."""
        parts, missing = [NO_INTS], max(0, count - self._num_blank)
        for ring in self._rings:
            parts.append(ring.first(missing))
            missing -= len(parts[-1])
        return np.concatenate(parts)

    def pages_of(self, blocks: BlockIds) -> Ints:
        """Return each page that has any of these blocks, once. No block may occur twice."""
        pages = self._pages(blocks)
        return pages if self.page_blocks == 1 else self._once(pages)

    def _pages(self, blocks: BlockIds) -> Ints:
        """Return the page of each block."""
        numbers: Ints = blocks.astype(np.int64, copy=False)
        return numbers if self.page_blocks == 1 else numbers // self.page_blocks

    def _once(self, pages: Ints) -> Ints:
        """Return each of these pages once, in the order of their last occurrences."""
        places = np.arange(len(pages))
        self._place[pages] = places
        once: Ints = pages[self._place[pages] == places]
        return once

    def num_revived(self, blocks: BlockIds) -> int:
        """Return how many pages with these found blocks would leave the free lists if they were held."""
        return self._num_in_rings(self.pages_of(blocks))

    def hold(self, blocks: BlockIds) -> None:
        """Add one reference for each of these found blocks. Call this before any allocation, which might evict them."""
        self._revive(self.pages_of(blocks))
        np.add.at(self.ref_count, self._pages(blocks), 1)

    def _num_in_rings(self, pages: Ints) -> int:
        return sum(int(np.count_nonzero(ring.holds(pages))) for ring in self._rings)

    def _revive(self, pages: Ints) -> None:
        """Remove these pages from the free lists."""
        self.num_free -= self._num_in_rings(pages)
        self.num_fenced -= int(np.count_nonzero(self._fence_of[pages] != _NO_FENCE))
        for ring in self._rings:
            ring.discard(pages)
        self._fence_of[pages] = _NO_FENCE

    def free(self, blocks: BlockIds, fence: int | None) -> None:
        """Drop one reference for each of these blocks, in this order: pass a request's tail first.

        fence: the last step in flight that may use them, or None.
        """
        released = self._pages(blocks)
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

    def _drop(self, pages: Ints) -> Ints:
        """Subtract one reference for each entry; return the pages that have none left."""
        np.subtract.at(self.ref_count, pages, 1)
        pages = self._once(pages)  # a page shared by requests that end together is released with the last of them
        counts = self.ref_count[pages]
        assert not len(pages) or counts.min() >= 0, f"freed twice: {pages[counts < 0]}"
        released: Ints = pages[counts == 0]
        return released

    def set_urgency(self, blocks: BlockIds, urgency: Ints) -> None:
        """Set the ring of the page of each of these blocks, before free()."""
        self.urgency[self._pages(blocks)] = urgency

    def lift_fences(self, step: int) -> None:
        """Free the pages that were fenced by this step, whose update is done."""
        while self._fenced and self._fenced[0][0] <= step:
            fence, pages = self._fenced.popleft()
            lifted = pages[self._fence_of[pages] == fence]  # the others have been revived since
            self._fence_of[lifted] = _NO_FENCE
            self.num_fenced -= len(lifted)
            self._make_free(lifted)

    def forget(self) -> None:
        """Empty the prefix cache: cached pages become blank, held blocks lose their names."""
        self.names.forget_all()
        for tier in self.tiers:
            tier.forget()
        for ring in self._rings:
            self._push_blank(ring.clear())

    def forget_names(self, blocks: BlockIds) -> None:
        """Remove the names of these held blocks of the first kind of layer, so that they can no longer be found."""
        for tier in self.tiers:
            tier.forget_contents(self.names.content[blocks])
        self.names.forget(blocks[self.names.content[blocks] != UNNAMED])
        self._blank_orphans()

    def _make_free(self, pages: Ints) -> None:
        self.num_free += len(pages)
        found = self._is_found(pages)
        self._push_blank(pages[~found])
        pages = pages[found]
        if len(self._rings) == 1:
            self._rings[0].push(pages)
            return
        urgency = self.urgency[pages]
        for number, ring in enumerate(self._rings):
            ring.push(pages[urgency == number])

    def _is_found(self, pages: Ints) -> Bools:
        """Return which of these pages have findable content, bool [n]."""
        content, firsts = self.names.content, pages if self.page_blocks == 1 else pages * self.page_blocks
        found: Bools = content[firsts] != UNNAMED
        for place in range(1, self.page_blocks):
            found |= content[firsts + place] != UNNAMED
        for beside in self.names.beside:
            found |= beside.owner[pages] != NULL_BLOCK
        return found

    def _forget(self, pages: Ints) -> None:
        """Make the content of these evicted pages unfindable."""
        blocks = self.inside(pages)
        for beside in self.names.beside:
            beside.forget_pages(pages)
            blocks = blocks[self.names.content[blocks] != UNNAMED]
        if len(blocks):
            self.names.forget(blocks)
        self._blank_orphans()

    def _blank_orphans(self) -> None:
        """Turn pages in the rings that can no longer be found into blank ones."""
        for beside in self.names.beside:
            pages = beside.take_orphans()
            for ring in self._rings:
                here = pages[ring.holds(pages)]
                ring.discard(here)
                self._push_blank(here)

    def _push_blank(self, pages: Ints) -> None:
        self._blank[self._num_blank : self._num_blank + len(pages)] = pages
        self._num_blank += len(pages)

    def _evict(self, count: int) -> Ints:
        """Remove the first cached pages in eviction order, and make them unfindable."""
        parts = []
        for ring in self._rings:
            parts.append(ring.pop(min(count, len(ring))))
            count -= len(parts[-1])
        assert not count, f"{count} pages missing from the rings"
        evicted = parts[0] if len(parts) == 1 else np.concatenate(parts)
        for tier in self.tiers:
            tier.keep(evicted)
        self._forget(evicted)
        return evicted

    def check_integrity(self, tables: Sequence[BlockIds]) -> None:
        """Recount all states from scratch, from the block tables of all rows. Raise AssertionError with the numbers."""
        rings = [ring.check_integrity() for ring in self._rings]
        free = np.concatenate([self._blank[: self._num_blank], *rings])
        assert self.num_free == len(free), f"{self.num_free} free, {self._num_blank} blank, in the rings {rings}"
        held = np.concatenate([_NULL_TABLE, *tables]) // self.page_blocks
        num_fenced = _recount(free.tobytes(), held.tobytes(), self.ref_count.tobytes(), self._fence_of.tobytes())
        assert self.num_fenced == num_fenced, f"{self.num_fenced} fenced, {num_fenced} found"
        self.names.check_integrity()
        found = self._is_found(free)
        assert not np.count_nonzero(found[: self._num_blank]), "a blank page can be found"
        assert np.count_nonzero(found) == len(free) - self._num_blank, "a page without findable content is in a ring"


@lru_cache(maxsize=4)  # tests check after every step, and every second step changes none of these
def _recount(free_blocks: bytes, tables: bytes, ref_counts: bytes, fences: bytes) -> int:
    """Check that each block is free, fenced, or held as often as the tables say. Return the number of fenced ones."""
    free, ref_count = np.frombuffer(free_blocks, np.int64), np.frombuffer(ref_counts, np.int32)
    owners = np.bincount(np.frombuffer(tables, np.int64), minlength=len(ref_count))
    if np.count_nonzero(owners != ref_count):
        wrong = np.flatnonzero(owners != ref_count)[:8]
        raise AssertionError(f"blocks {wrong}: {owners[wrong]} owners, ref_count {ref_count[wrong]}")
    held, fenced = owners.nonzero()[0], (np.frombuffer(fences, np.int64) != _NO_FENCE).nonzero()[0]
    places = np.concatenate([free, held, fenced]).tolist()
    if sorted(places) != list(range(len(ref_count))):  # each block is in exactly one state, and there once
        states = {"free": free, "held": held, "fenced": fenced}
        odd = [block for block in range(len(ref_count)) if places.count(block) != 1][:8]
        found = {block: [name for name, state in states.items() if block in state] for block in odd}
        raise AssertionError(f"blocks in no state, in several, or in one twice: {found}")
    return len(fenced)
