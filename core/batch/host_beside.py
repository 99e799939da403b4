"""HostBeside: blocks of a further kind of layer on the host, found by the content of the named block they belong to.

Such a block is a page of the cache (core/models/layers/cache_pages.py) and takes as many slots as a page has blocks. It
and the named block with its content can be on the host independently of each other. If one of its slots is given away,
all are.
"""

from typing import NamedTuple

import numpy as np

from core.kv.block_names import UNNAMED
from ipc.tables.arrays import Bools, Int32s, Ints

#: Used instead of a slot: the block is not kept.
UNKNOWN = -1


class OtherReach(NamedTuple):
    """What the KV cache and the host have of a further kind of layer, for a prompt's first n blocks."""

    found: Ints  # [n] the block in the cache; NULL_BLOCK: it is not there
    leads: Ints  # [n] the first slot of the block on the host; UNKNOWN: it is not there, or was not looked for

    @property
    def is_there(self) -> Bools:
        """Return which blocks are in the cache or on the host, bool [n]."""
        is_there: Bools = (self.found != 0) | (self.leads != UNKNOWN)
        return is_there


class Reach(NamedTuple):
    """What the KV cache and the host have of a prompt's first n blocks, including all of the first kind of layer."""

    slots: Int32s  # slots on the host, of the blocks after those in the cache
    contents: Ints  # [n]
    others: list[OtherReach]  # one per further kind


class HostBeside:
    """Which slots have the blocks of one kind.

    content [num_slots]: content of the block that each slot has a part of.
    """

    def __init__(self, num_slots: int, page_blocks: int) -> None:
        self.page_blocks = page_blocks
        self.content: Ints = np.zeros(num_slots, np.int64)
        self._lead_of: dict[int, int] = {}  # by content: the first slot of its block
        self._slots_of: Ints = np.zeros((num_slots, page_blocks), np.int64)  # by first slot: all slots of the block

    @property
    def num_slots(self) -> int:
        """Return the number of slots with a block of this kind."""
        return self.page_blocks * len(self._lead_of)

    def leads_of(self, contents: Ints) -> Ints:
        """Return the first slot of the block for each content; UNKNOWN if it is not here."""
        return np.array([self._lead_of.get(content, UNKNOWN) for content in contents.tolist()], np.int64)

    def slots_of(self, leads: Ints) -> Ints:
        """Return all slots of the blocks with these first slots, block after block."""
        slots: Ints = self._slots_of[leads].reshape(-1)
        return slots

    def put(self, contents: Ints, slots: Ints) -> None:
        """Make the blocks for these contents [n], none of which is here, findable in the given slots."""
        whole = slots.reshape(-1, self.page_blocks)
        self._slots_of[whole[:, 0]] = whole
        self.content[slots] = contents.repeat(self.page_blocks)
        self._lead_of.update(zip(contents.tolist(), whole[:, 0].tolist(), strict=True))

    def forget(self, contents: Ints) -> Ints:
        """Make the blocks for these contents unfindable, and return the slots of those that were here."""
        leads = self.leads_of(contents)
        slots = self.slots_of(leads[leads != UNKNOWN])
        for content in self.content[slots[:: self.page_blocks]].tolist():
            del self._lead_of[content]
        self.content[slots] = UNNAMED
        return slots

    def forget_all(self) -> None:
        """Make all blocks unfindable."""
        self._lead_of.clear()
        self.content[:] = UNNAMED

    def check_integrity(self, contents: Ints) -> None:
        """Check that no slot is lost or used twice.

        Errors: AssertionError. contents: of the named blocks in the slots.
        """
        own, leads = list(self._lead_of), np.array(list(self._lead_of.values()), np.int64)
        slots = self._slots_of[leads]
        assert (self.content[slots] == np.array(own, np.int64)[:, None]).all(), "a block has lost a slot"
        assert len(np.unique(slots)) == slots.size, "a slot belongs to two blocks"
        assert np.count_nonzero(self.content) == slots.size, "a slot belongs to a block that cannot be found"
        both = np.flatnonzero((self.content != UNNAMED) & (contents != UNNAMED))
        assert not len(both), f"slots {both[:8]} have two contents"
