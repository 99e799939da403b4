"""Orders: what the scheduler wants of a store of KV blocks beyond the host's memory, such as a folder of files.

The engine's process carries them out after the step that gave them, and answers with inputs (core/inputs.py). A replay
has nobody who carries them out: the answers are in its log.
"""

from typing import NamedTuple, TypeAlias

from core.kv.cache_kinds import CacheKind
from ipc.tables.arrays import NO_INT32S, NO_INTS, Bools, Int32s, Ints


class Windows(NamedTuple):
    """What is there of the blocks of layers with a window, where these have blocks of their own.

    A request can use the first blocks of a prompt if all of them are there, and beside them those of the window before
    its next token.
    """

    kind: CacheKind
    least: int  # blocks that the request can use without the store
    most: int  # blocks for which there is room
    is_here: Bools  # of each block of the prompt, whether the one beside it is there without the store


class Look(NamedTuple):
    """Count the blocks that the store has, from block `first` of a prompt on. Answer: BlocksFound.

    With windows the answer is how many more than the least the request could use.
    """

    ticket: int
    root: int  # see ipc/wire/block_roots.py
    token_ids: Int32s  # of whole blocks, from the prompt's beginning to the last block that is wanted
    first: int
    windows: Windows | None = None


class Fetch(NamedTuple):
    """Read blocks `first`, `first` + 1, ... of a prompt into these slots of the host pool. Answer: BlocksArrived.

    Then those of layers with a window beside the blocks at `places`, which have several slots each. Nothing is read
    behind what cannot be read; the answer counts what has come.
    """

    ticket: int
    root: int
    token_ids: Int32s
    first: int
    slots: Int32s  # [n], which nobody else uses until the answer
    places: Int32s = NO_INT32S  # [m]
    window_slots: Int32s = NO_INT32S  # [m * slots of a block of windows], like slots


class Store(NamedTuple):
    """Write the blocks in these slots of the host pool, which have these contents. Answer: BlocksStored."""

    ticket: int
    slots: Int32s  # [n], which nobody writes until the answer
    contents: Ints  # [n]
    is_beside: bool = False  # they are those of layers with a window beside the contents, and have several slots each


class Leave(NamedTuple):
    """Learn what a request leaves in the KV cache, and write those of its blocks that stay there for long enough.

    A block is what it was while its content is the same and it has been evicted as often as here. Both are looked up
    before and after it is read. There is no answer.
    """

    root: int
    token_ids: Int32s  # of whole blocks
    blocks: Int32s  # [n] of the KV cache
    contents: Ints  # [n]; UNNAMED: the block has no name of its own
    evictions: Ints  # [n]
    #: [n] of the KV cache: the block of layers with a window beside each, NULL_BLOCK: none. Empty where the layers have
    #: their blocks in common.
    beside: Int32s = NO_INT32S
    evictions_beside: Ints = NO_INTS  # [n]


Order: TypeAlias = Look | Fetch | Store | Leave
