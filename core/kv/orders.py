"""Orders: what the scheduler wants from a store of KV blocks beyond the host's memory, such as a folder of files.

The engine's process carries them out after the step that gave them, and answers with inputs (core/inputs.py). In a
replay they are not carried out, because the log has the answers.
"""

from typing import NamedTuple, TypeAlias

from core.kv.cache_kinds import CacheKind
from ipc.tables.arrays import NO_INT32S, NO_INTS, Bools, Int32s, Ints


class Windows(NamedTuple):
    """Which blocks of layers with a window are available, if these layers have their own blocks.

    A request can use the first blocks of a prompt if all of them are there, together with the window layers' blocks for
    the window before its next token.
    """

    kind: CacheKind
    least: int  # blocks that the request can use without the store
    most: int  # blocks for which there is room
    is_here: Bools  # for each block of the prompt, whether its window block is there without the store


class Look(NamedTuple):
    """Count the blocks that the store has, from block `first` of a prompt on. Answer: BlocksFound.

    With windows the answer is how many blocks more than `least` the request could use.
    """

    ticket: int
    root: int  # see ipc/wire/block_roots.py
    token_ids: Int32s  # tokens of whole blocks, from the start of the prompt to the last block that is wanted
    first: int
    windows: Windows | None = None


class Fetch(NamedTuple):
    """Read blocks `first`, `first` + 1, ... of a prompt into these slots of the host pool. Answer: BlocksArrived.

    Then read the window blocks that go with the blocks at `places`; each has several slots. Reading stops at the first
    block that cannot be read. The answer counts the blocks that were read.
    """

    ticket: int
    root: int
    token_ids: Int32s
    first: int
    slots: Int32s  # [n]; reserved until the answer
    places: Int32s = NO_INT32S  # [m]
    window_slots: Int32s = NO_INT32S  # [m * slots of a window block], like slots


class Store(NamedTuple):
    """Write the blocks in these slots of the host pool, which have these contents. Answer: BlocksStored."""

    ticket: int
    slots: Int32s  # [n]; not written by others until the answer
    contents: Ints  # [n]
    is_beside: bool = False  # they are the window blocks that go with the contents, and have several slots each


class Leave(NamedTuple):
    """Record what a request leaves in the KV cache, and write those of its blocks that stay there for long enough.

    A block is unchanged if it has the same content and eviction count as here. Both are compared before and after it is
    read. There is no answer.
    """

    root: int
    token_ids: Int32s  # tokens of whole blocks
    blocks: Int32s  # [n] blocks of the KV cache
    contents: Ints  # [n]; UNNAMED: the block has no name
    evictions: Ints  # [n]
    #: [n] blocks of the KV cache: the window block that goes with each block, or NULL_BLOCK. Empty if all layers share
    #: their blocks.
    beside: Int32s = NO_INT32S
    evictions_beside: Ints = NO_INTS  # [n]


class Retain(NamedTuple):
    """Keep the blocks with these contents for a time, or no longer: prompts with them are pinned. There is no answer.

    It follows the Leave that tells their names. Those that are written later are kept too.
    """

    contents: Ints  # [n]
    ttl_ms: int  # from now on; 0 = no longer
    beside: Ints = NO_INTS  # [m] contents; what is next to these blocks is kept, too: see Leave


Order: TypeAlias = Look | Fetch | Store | Leave | Retain
