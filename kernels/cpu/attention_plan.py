"""AttentionPlan: a step's attention as work items for the C kernel (kernels/cpu/c/attention/attention_plan.h).

A plan is made once per step, and every layer uses it. How the work is split does not change any bit of any result
(kernels/cpu/c/attention/attention.h). So the sizes below can be chosen for the machine's speed alone.
"""

import ctypes

import numpy as np

from kernels.arrays import AnyInts, Int32s, Ints
from kernels.cpu.library import CpuLibrary
from kernels.cpu.structs import AttentionItem, AttentionMember, AttentionMerge, PlanArguments, TileUser

#: Tokens; enum in attention.h.
TILE = 512

#: The most rows of an item: tokens x query heads per KV head. Their running sums fit a core's second level cache.
MAX_ITEM_ROWS = 192

#: Items of at most this many rows are split along their context: partial results cost less than the KV cache they read.
MAX_SPLIT_ROWS = 64

#: The most rows of an item with tokens of several requests that share a tile's blocks. It is small, so that threads get
#: similar shares.
MAX_SHARED_ROWS = 24

#: Tokens: more than any context has.
_ALL = 1 << 30

#: How many int32 numbers a plan reserves for each item, by array.
_STRUCTS = {"items": AttentionItem, "merges": AttentionMerge, "members": AttentionMember, "tile_users": TileUser}
_STRUCTS |= {"wanted_items": AttentionItem, "wanted_merges": AttentionMerge}
_ROOM = {name: ctypes.sizeof(struct) // 4 for name, struct in _STRUCTS.items()} | {"places": 2}


class AttentionPlan:
    """One step's attention for the layers of one window.

    Its arrays keep their addresses from step to step. So a step touches little memory: the weights push everything else
    out of the CPU's caches.

    shares_blocks: whether blocks that several requests have in common are read once for all of them. If it is not
    causal, a row sees as many tokens after it as before it, within its context. In a causal plan, the
    tokens of a whole all see each other.
    """

    def __init__(
        self, num_kv_heads: int, group: int, window: int | None, *, is_causal: bool = True, shares_blocks: bool = True
    ) -> None:
        self._generation = 0  # of the columns below; 0 = none
        self.window = window  # tokens that a row sees, including itself; None = all before it
        self.has_window_slots = window is not None  # its layers store K and V at the slots for windows
        self.num_tokens: Ints = np.zeros(0, np.int64)  # [R]
        self.context_lens: Ints = self.num_tokens  # [R]
        self.wholes: Ints | None = None  # [n, 2] first token of the step, number of tokens; see take()
        self.block_tables: Int32s = np.zeros((0, 0), np.int32)  # [R, P]
        self.arguments = PlanArguments(
            num_kv_heads=num_kv_heads,
            group=group,
            window=window or 0,
            ahead=0 if is_causal else window - 1 if window else _ALL,
            max_split_rows=MAX_SPLIT_ROWS,
            max_members=max(1, MAX_SHARED_ROWS // group) if is_causal and shares_blocks else 1,
        )
        self.reserve(64)

    @property
    def num_rows(self) -> int:
        """Return the number of rows of q and of the output."""
        return self.arguments.num_rows

    @property
    def longest(self) -> int:
        """Return the largest context length of the step, in tokens."""
        return self.arguments.longest

    @property
    def items(self) -> Int32s:
        """Return the work items [I, 10] int32 (struct AttentionItem), longest first, lengths rounded to an eighth."""
        return self._room[0][: self.arguments.num_items]

    @property
    def merges(self) -> Int32s:
        """Return the merges of partial results [M, 5] int32, struct AttentionMerge."""
        return self._room[1][: self.arguments.num_merges]

    @property
    def members(self) -> Int32s:
        """Return the tokens of items shared by several requests, [N, 2] int32, struct AttentionMember."""
        return self._room[2][: self.arguments.num_members]

    @property
    def num_partials(self) -> int:
        """Return the number of rows of partial results."""
        return self.arguments.num_partials

    @property
    def max_item_tokens(self) -> int:
        """Return the number of tokens of the largest item."""
        return self.arguments.max_item_tokens

    def take(
        self,
        num_tokens: AnyInts,
        context_lens: AnyInts,
        block_tables: AnyInts,
        generation: int,
        wholes: Ints | None = None,
    ) -> None:
        """Point the plan to the step's columns: num_tokens [R], context_lens [R], block_tables [R, P].

        wholes [n, 2] int64: runs of tokens that all see each other, each in one request: index of the first one in the
        step, ascending, and their number. If `generation` is not 0 and equals the last one, the arrays are the same and
        their pointers are kept. Columns of a generation other than 0 must be int64, int64 and int32, and contiguous, so
        that none is copied.
        """
        if wholes is not self.wholes:
            self.wholes = wholes
            self.arguments.wholes = None if wholes is None else wholes.ctypes.data
            self.arguments.num_wholes = 0 if wholes is None else len(wholes)
        if generation and generation == self._generation:
            return
        self._generation = generation
        self.num_tokens = np.ascontiguousarray(num_tokens, np.int64)
        self.context_lens = np.ascontiguousarray(context_lens, np.int64)
        self.block_tables = np.ascontiguousarray(block_tables, np.int32)
        assert not generation or (self.context_lens is context_lens and self.block_tables is block_tables), "copied"
        arguments = self.arguments
        arguments.num_tokens, arguments.context_lens = self.num_tokens.ctypes.data, self.context_lens.ctypes.data
        arguments.blocks, arguments.width = self.block_tables.ctypes.data, self.block_tables.shape[1]
        arguments.num_requests = len(self.num_tokens)

    def reserve(self, max_items: int) -> None:
        """Allocate the arrays for max_items items, a power of two."""
        self._room = [np.empty((max_items, num_fields), np.int32) for num_fields in _ROOM.values()]
        self.arguments.max_items = max_items
        for name, array in zip(_ROOM, self._room, strict=True):
            setattr(self.arguments, name, array.ctypes.data)


class AttentionPlanner:
    """Makes the attention plans of a model with num_heads query heads and num_kv_heads KV heads.

    is_causal, shares_blocks: see AttentionPlan."""

    def __init__(
        self,
        library: CpuLibrary,
        num_heads: int,
        num_kv_heads: int,
        *,
        is_causal: bool = True,
        shares_blocks: bool = True,
    ) -> None:
        self._num_kv_heads, self._group = num_kv_heads, num_heads // num_kv_heads
        self._is_causal, self._shares_blocks = is_causal, shares_blocks
        self._run = library.function("attention_plan", ctypes.POINTER(PlanArguments))
        self._plans: dict[int | None, AttentionPlan] = {}  # by window

    def __call__(
        self,
        num_tokens: AnyInts,
        context_lens: AnyInts,
        block_tables: AnyInts,
        block_size: int,
        window: int | None = None,
        generation: int = 0,
        wholes: Ints | None = None,
    ) -> AttentionPlan:
        """Plan the attention of a batch whose tokens are packed request after request.

        The arguments are those of attention_metadata(); wholes: see AttentionPlan.take(). The plan is valid until the
        next one for this window is made. Equal generations other than 0 mean that the columns are the previous plan's
        arrays with new numbers.
        """
        plan = self._plans.get(window)
        if plan is None:
            plan = AttentionPlan(
                self._num_kv_heads, self._group, window, is_causal=self._is_causal, shares_blocks=self._shares_blocks
            )
            self._plans[window] = plan
        plan.take(num_tokens, context_lens, block_tables, generation, wholes)
        arguments = plan.arguments
        arguments.block_size = block_size
        arguments.max_item_tokens = most = max(1, MAX_ITEM_ROWS // self._group)
        self._run(arguments)
        if arguments.num_items > arguments.max_items:
            plan.reserve(1 << (arguments.num_items - 1).bit_length())
            arguments.max_item_tokens = most
            self._run(arguments)
        return plan
