"""What pins hold next to named blocks: blocks of layers with a window, or recurrent states.

With these, a request can use a prefix only if the window before its next token is there, or the state after the
prefix. A pin holds them for the end of what it holds: they move on with the request that computes the prefix.
"""

from typing import Protocol

import numpy as np

from core.batch import kept_states
from core.batch.batch import Batch
from core.batch.kept_states import KeptStates
from core.kv.block_names import block_key
from core.kv.block_pool import NULL_BLOCK
from core.scheduling.pins.held_blocks import HeldBlocks
from core.scheduling.pins.pinned_prefix import PinLedger, PinnedPrefix
from ipc.tables.arrays import NO_INT32S, Int32s, Ints

#: A pin holds at most this many states: after its last block, and one before, because a chat template may end a prompt
#: with tokens that the next turn does not repeat.
STATES_OF_PIN = 2


class PinnedBeside(Protocol):
    """What pins hold next to blocks of one kind of layer."""

    def never_holds(self, num_tokens: int) -> str:
        """Return why it is not kept for a prefix of so many tokens, or ""."""

    def charge(self, keys: list[int]) -> list[int]:
        """Return keys for what a pin with these keys is charged in addition; each is as large as a named block."""

    def charges(self, pinned: PinnedPrefix) -> list[tuple[PinLedger, list[int]]]:
        """Return other ledgers, and the keys that a pin has there."""

    def enter(self, pinned: PinnedPrefix) -> None:
        """Prepare for a new pin."""

    def hold(self, pinned: PinnedPrefix, *, only_held: bool) -> list[int]:
        """Hold what is there next to the blocks of a pin, and return with how many of these a request can start.

        only_held: no block may leave or enter the free lists.
        """

    def settle(self, pinned: PinnedPrefix) -> None:
        """Give up what has been passed, after the request has ended."""

    def drop(self, pinned: PinnedPrefix, count: int) -> None:
        """Give up all that cannot be used with the first `count` blocks."""

    def contents(self, pinned: PinnedPrefix, first: int) -> Ints:
        """Return the contents next to which the pin holds something, from block `first` on."""

    def held(self, pinned: PinnedPrefix) -> list[Int32s]:
        """Return the blocks that the pin holds."""


class PinnedWindows:
    """The blocks of layers with a window, of the window before the next token."""

    def __init__(self, batch: Batch, blocks: HeldBlocks) -> None:
        self._batch, self._blocks = batch, blocks

    def never_holds(self, num_tokens: int) -> str:
        """Return "": any prefix has a window."""
        return ""

    def charge(self, keys: list[int]) -> list[int]:
        """Charge a page for each block of the windows, which is as large as page_blocks named blocks."""
        size, width = self._batch.block_size, self._batch.pool.page_blocks
        return [
            block_key(key, 1 + number * width + part)
            for number, other in enumerate(self._batch.others)
            for key in keys[other.kind.num_passed(len(keys) * size) :]
            for part in range(width)
        ]

    def charges(self, pinned: PinnedPrefix) -> list[tuple[PinLedger, list[int]]]:
        """Return nothing: their memory is that of the blocks."""
        return []

    def enter(self, pinned: PinnedPrefix) -> None:
        """Make room for a new pin's blocks."""
        pinned.others = [NO_INT32S] * len(self._batch.others)

    def hold(self, pinned: PinnedPrefix, *, only_held: bool) -> list[int]:
        """Hold the blocks of the window; a request can start if all are there."""
        count, pool, is_whole = len(pinned.blocks), self._batch.pool, True
        for other, beside in zip(self._batch.others, pool.names.beside, strict=True):
            first, have = other.kind.num_passed(count * self._batch.block_size), np.zeros(count, np.int32)
            have[: len(pinned.others[other.number])] = pinned.others[other.number][:count]
            found = beside.found[pinned.blocks]
            new = (have == NULL_BLOCK) & (found != NULL_BLOCK)
            new[:first] = False
            if only_held:
                new &= pool.ref_count[found // pool.page_blocks] > 0
            if new.any() and self._blocks.take(pinned.tenant, found[new]):
                have[new] = found[new]
            pinned.others[other.number] = have
            is_whole = is_whole and not (have[first:] == NULL_BLOCK).any()
        if not only_held:
            self.settle(pinned)
        return [count] if is_whole and count else []

    def settle(self, pinned: PinnedPrefix) -> None:
        """Give up the blocks before the window."""
        for other, have in zip(self._batch.others, pinned.others, strict=True):
            passed = have[: other.kind.num_passed(len(pinned.blocks) * self._batch.block_size)]
            self._blocks.give(pinned.tenant, passed[passed != NULL_BLOCK])
            passed[:] = NULL_BLOCK

    def drop(self, pinned: PinnedPrefix, count: int) -> None:
        """Give up all blocks: the window of fewer blocks is another one."""
        for blocks in self.held(pinned):
            self._blocks.give(pinned.tenant, blocks)
        pinned.others = [NO_INT32S] * len(self._batch.others)

    def contents(self, pinned: PinnedPrefix, first: int) -> Ints:
        """Return the contents of the blocks whose windows' blocks it holds."""
        places = np.zeros(len(pinned.blocks), np.bool_)
        for have in pinned.others:
            places[: len(have)] |= have != NULL_BLOCK
        places[:first] = False
        contents: Ints = self._batch.pool.names.content[pinned.blocks[places]]
        return contents

    def held(self, pinned: PinnedPrefix) -> list[Int32s]:
        """Return the blocks, one array for each kind of layer."""
        return [have[have != NULL_BLOCK] for have in pinned.others]


class PinnedStates:
    """The last recurrent states of a pin's blocks."""

    def __init__(self, batch: Batch, kept: KeptStates, shares: tuple[float, float]) -> None:
        self._batch, self._kept = batch, kept
        most, most_of_tenant = (int(share * kept.num_slots) for share in shares)
        self._ledger = PinLedger(most, most_of_tenant, 1, "recurrent states")

    def never_holds(self, num_tokens: int) -> str:
        """Return that a short prefix has no state."""
        least = kept_states.LEAST_TOKENS
        return "" if num_tokens >= least else f"it is shorter than {least} tokens, before which no state is kept"

    def charge(self, keys: list[int]) -> list[int]:
        """Charge nothing next to the blocks: states have memory of their own."""
        return []

    def charges(self, pinned: PinnedPrefix) -> list[tuple[PinLedger, list[int]]]:
        """Return the ledger of states. Pins with the same end have theirs in common."""
        return [(self._ledger, pinned.keys[-STATES_OF_PIN:])]

    def enter(self, pinned: PinnedPrefix) -> None:
        """Have the request that computes the prefix store the last state."""
        if (request := pinned.request) is not None:
            for choice in request.choices or (request,):
                choice.state_places = (*choice.state_places, len(pinned.token_ids))

    def settle(self, pinned: PinnedPrefix) -> None:
        """Do nothing: states are passed at once."""

    def hold(self, pinned: PinnedPrefix, *, only_held: bool) -> list[int]:
        """Hold the last states; a request can start after each."""
        contents = self._batch.pool.names.content[pinned.blocks]
        ends = {end: int(contents[end - 1]) for end in self._kept.last_ends(contents, STATES_OF_PIN)}
        for end in [end for end in pinned.states if end not in ends]:
            self._kept.unpin(pinned.states.pop(end))
        for end, content in ends.items():
            if end not in pinned.states and self._kept.pin(content, self._ledger.max_blocks):
                pinned.states[end] = content
        return sorted(pinned.states)

    def drop(self, pinned: PinnedPrefix, count: int) -> None:
        """Give up the states after more blocks."""
        for end in [end for end in pinned.states if end > count]:
            self._kept.unpin(pinned.states.pop(end))

    def contents(self, pinned: PinnedPrefix, first: int) -> Ints:
        """Return the contents after which it holds states."""
        return np.array([content for end, content in pinned.states.items() if end > first], np.int64)

    def held(self, pinned: PinnedPrefix) -> list[Int32s]:
        """Return no blocks."""
        return []


def make_beside(batch: Batch, blocks: HeldBlocks, shares: tuple[float, float]) -> list[PinnedBeside]:
    """Return what pins of this model hold next to blocks; for most models nothing.

    shares: of the memory, that all pins may hold, and those of a tenant.
    """
    made = list[PinnedBeside]()
    if batch.others:
        made.append(PinnedWindows(batch, blocks))
    if batch.kept_states is not None:
        made.append(PinnedStates(batch, batch.kept_states, shares))
    return made
