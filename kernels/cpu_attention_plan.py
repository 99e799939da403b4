"""AttentionPlan: a step's attention as the C kernel's work items, worked out once and used by every layer
(kernels/cpu/attention_plan.h).

How the work is cut changes no bit of any result (kernels/cpu/attention.h), so sizes are free to suit the machine.
"""

import ctypes
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.attention_metadata import AnyInts, Ints
from kernels.cpu_library import CpuLibrary

#: Tokens; enum in attention.h.
TILE = 512

#: Rows - tokens x query heads of a KV head - of an item: what they have so far stays in a core's second level cache.
MAX_ITEM_ROWS = 192

#: Items of no more rows than this are split along their context: their results cost less than what they read.
MAX_SPLIT_ROWS = 64

#: Rows of an item whose tokens are of several requests, which have a tile's blocks in common: few enough for threads to
#: have a like share of them.
MAX_SHARED_ROWS = 24

_ITEM_FIELDS, _MERGE_FIELDS, _MEMBER_FIELDS, _USER_FIELDS = 9, 5, 2, 9  # int32 each
_PLACES = 2  # int32 for each item

Int32s = NDArray[np.int32]


class AttentionPlan(NamedTuple):
    """One step's attention for the layers of one window."""

    num_tokens: Ints  # [R]
    context_lens: Ints  # [R]
    block_tables: Int32s  # [R, P]
    num_rows: int  # rows of q and of the output
    longest: int  # of context_lens
    window: int | None  # tokens that a row sees, itself included; None = all before it
    items: Int32s  # [I, 9] struct AttentionItem, the longest first, as far as an eighth
    merges: Int32s  # [M, 5] struct AttentionMerge
    members: Int32s  # [N, 2] struct AttentionMember
    num_partials: int  # rows of partial results
    max_item_tokens: int

    def first_seen(self, position: int) -> int:
        """The first position that the row at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)


_POINTERS = ("num_tokens", "context_lens", "items", "merges", "members", "tile_users", "places", "block_tables")


class _PlanArguments(ctypes.Structure):
    """struct AttentionPlan."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("table_width", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("num_requests", "max_items")),
        *(
            (name, ctypes.c_int32)
            for name in ("num_kv_heads", "group", "window", "max_item_tokens", "max_split_rows", "max_members")
        ),
        *((name, ctypes.c_int64) for name in ("num_items", "num_merges", "num_members", "num_partials")),
        ("num_tile_users", ctypes.c_int64),
    )


class AttentionPlanner:
    """Makes the plans of a model with so many heads."""

    def __init__(self, library: CpuLibrary, num_heads: int, num_kv_heads: int) -> None:
        self._num_kv_heads, self._group = num_kv_heads, num_heads // num_kv_heads
        self._run = library.function("attention_plan", ctypes.POINTER(_PlanArguments))
        self._reserve(64)

    def __call__(
        self,
        num_tokens: AnyInts,
        context_lens: AnyInts,
        block_tables: AnyInts,
        block_size: int,
        window: int | None = None,
    ) -> AttentionPlan:
        """The work of a batch whose tokens are packed request after request; arguments as attention_metadata's."""
        counts = np.ascontiguousarray(num_tokens, np.int64)
        lengths = np.ascontiguousarray(context_lens, np.int64)
        tables = np.ascontiguousarray(block_tables, np.int32)
        plan = _PlanArguments(
            num_tokens=counts.ctypes.data,
            context_lens=lengths.ctypes.data,
            block_tables=tables.ctypes.data,
            table_width=tables.shape[1],
            block_size=block_size,
            num_requests=len(counts),
            num_kv_heads=self._num_kv_heads,
            group=self._group,
            window=window or 0,
            max_split_rows=MAX_SPLIT_ROWS,
            max_members=max(1, MAX_SHARED_ROWS // self._group),
        )
        items, merges, members = self._fill(plan)
        if len(items) < plan.num_items:
            self._reserve(1 << (plan.num_items - 1).bit_length())
            items, merges, members = self._fill(plan)
        return AttentionPlan(
            counts,
            lengths,
            tables,
            int(counts.sum()),
            int(lengths.max(initial=0)),
            window,
            items[: plan.num_items],
            merges[: plan.num_merges],
            members[: plan.num_members],
            plan.num_partials,
            plan.max_item_tokens,
        )

    def _reserve(self, max_items: int) -> None:
        """Room for plans of so many items, a power of two."""
        self._max_items = max_items
        self._room = np.empty((_USER_FIELDS + _PLACES) * max_items, np.int32)
        self._tile_users = self._room.ctypes.data
        self._places = self._tile_users + _USER_FIELDS * max_items * self._room.itemsize

    def _fill(self, plan: _PlanArguments) -> tuple[Int32s, Int32s, Int32s]:
        """Items, merges and members, each with room for max_items, filled if that is enough."""
        items = np.empty((self._max_items, _ITEM_FIELDS), np.int32)
        merges = np.empty((self._max_items, _MERGE_FIELDS), np.int32)
        members = np.empty((self._max_items, _MEMBER_FIELDS), np.int32)
        plan.items, plan.merges, plan.max_items = items.ctypes.data, merges.ctypes.data, self._max_items
        plan.members = members.ctypes.data
        plan.tile_users, plan.places = self._tile_users, self._places
        plan.max_item_tokens = max(1, MAX_ITEM_ROWS // self._group)
        self._run(plan)
        return items, merges, members
