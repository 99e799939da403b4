"""KeptStates: recurrent states at the ends of blocks, from which later requests with the same tokens go on.

A state is a function of the tokens before it, as a block's K and V are. So it is known by the number of the block's
content (core/kv/block_names.py), which is never given to another content. The states have slots behind those of the
rows; the one that was not used for longest makes room for a new one.
"""

from collections.abc import Sequence

from core.batch.carried import Carried
from core.batch.table import BatchTable, RequestStart
from core.kv.block_names import BlockNames
from ipc.tables.arrays import Int32s, Rows


class KeptStates:
    """The slots of states that are kept, by the content that ends there, least recently used first."""

    def __init__(self, table: BatchTable, names: BlockNames, num_rows: int, num_slots: int) -> None:
        """num_rows: places of states before the slots."""
        self._table, self._names = table, names
        self._free = list(range(num_rows + num_slots - 1, num_rows - 1, -1))
        self._slots: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of states."""
        return len(self._slots)

    def reachable(self, blocks: Int32s) -> int:
        """Return how many of these blocks, which begin a request, end with the last one that has a state."""
        contents = self._names.content[blocks].tolist()
        return next((count for count in range(len(blocks), 0, -1) if contents[count - 1] in self._slots), 0)

    def begin(self, starts: Sequence[RequestStart], carried: Carried) -> None:
        """Copy to the rows of starting requests the states behind their first blocks."""
        for start in starts:
            if start.num_hits:
                content = int(self._names.content[start.hits[-1]])
                slot = self._slots[content] = self._slots.pop(content)  # the last one now
                carried.states.add(slot, start.request.row)

    def keep(self, rows: Rows, carried: Carried) -> None:
        """Keep the states of these rows of the last plan which it leaves at the end of a block of their prompts.

        carried: of the next plan, whose rows' states are those after the last one.
        """
        table = self._table
        ends = table.num_computed_tokens[rows]
        named = table.num_named_blocks[rows] * self._names.block_size
        for row in rows[(ends == named) & (ends <= table.num_prompt_tokens[rows])].tolist():
            content = int(table.content[row])
            if content in self._slots:
                self._slots[content] = self._slots.pop(content)
                continue
            slot = self._free.pop() if self._free else self._slots.pop(next(iter(self._slots)))
            self._slots[content] = slot
            carried.states.add(row, slot)

    def check_integrity(self) -> None:
        """Check that no slot has two states. Errors: AssertionError."""
        slots = [*self._slots.values(), *self._free]
        assert len(slots) == len(dict.fromkeys(slots)), f"slots of states: {slots}"
