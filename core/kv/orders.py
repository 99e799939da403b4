"""Orders: what the scheduler wants of a store of KV blocks beyond the host's memory, such as a folder of files.

The engine's process carries them out after the step that gave them, and answers with inputs (core/inputs.py). A replay
has nobody who carries them out: the answers are in its log.
"""

from typing import NamedTuple, TypeAlias

from ipc.arrays import Int32s, Ints


class Look(NamedTuple):
    """Count the blocks that the store has, from block `first` of a prompt on. Answer: BlocksFound."""

    ticket: int
    root: int  # see ipc/block_roots.py
    token_ids: Int32s  # of whole blocks, from the prompt's beginning to the last block that is wanted
    first: int


class Fetch(NamedTuple):
    """Read blocks `first`, `first` + 1, ... of a prompt into these slots of the host pool. Answer: BlocksArrived."""

    ticket: int
    root: int
    token_ids: Int32s
    first: int
    slots: Int32s  # [n], which nobody else uses until the answer


class Store(NamedTuple):
    """Write the blocks in these slots of the host pool, which have these contents. Answer: BlocksStored."""

    ticket: int
    slots: Int32s  # [n], which nobody writes until the answer
    contents: Ints  # [n]


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


Order: TypeAlias = Look | Fetch | Store | Leave
