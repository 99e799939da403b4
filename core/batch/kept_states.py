"""KeptStates: recurrent states at the ends of blocks, from which later requests with the same tokens can continue.

Like a block's K and V, a state is a function of the tokens before it. So it is identified by the number of the block's
content (core/kv/block_names.py), which is never reused. The slots of the states come after those of the rows. The least
recently used state is replaced by a new one.
"""

from collections.abc import Sequence

from core.batch.carried import Carried
from core.batch.table import BatchTable, RequestStart
from core.kv.block_names import BlockNames
from ipc.tables.arrays import Int32s, Rows


class KeptStates:
    """The slots of kept states, by the content that ends there, least recently used first."""

    def __init__(self, table: BatchTable, names: BlockNames, num_rows: int, num_slots: int) -> None:
        """num_rows: number of state slots that belong to rows and come first."""
        self._table, self._names = table, names
        self._free = list(range(num_rows + num_slots - 1, num_rows - 1, -1))
        self._slots: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of states."""
        return len(self._slots)

    def reachable(self, blocks: Int32s) -> int:
        """Return how many of these blocks, the first of a request, end at the last one that has a state."""
        contents = self._names.content[blocks].tolist()
        return next((count for count in range(len(blocks), 0, -1) if contents[count - 1] in self._slots), 0)

    def begin(self, starts: Sequence[RequestStart], carried: Carried) -> None:
        """Copy the states after the first blocks of starting requests to their rows."""
        for start in starts:
            if start.num_hits:
                content = int(self._names.content[start.hits[-1]])
                slot = self._slots[content] = self._slots.pop(content)  # moves it to the end: the most recent one
                carried.states.add(slot, start.request.row)

    def keep(self, rows: Rows, carried: Carried) -> None:
        """Keep the states that the last plan left in these rows at the end of a block of their prompts.

        carried: the next plan's. At that point the rows' states are those after the last plan.
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
