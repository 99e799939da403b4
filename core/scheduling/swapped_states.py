"""SwappedStates: the recurrent states of preempted requests whose blocks are copied to the host.

A state is copied to a slot of its own, and back when the request resumes. It is of exactly the tokens that the row has
computed, so a row whose next tokens are still being computed is recomputed.
"""

from collections.abc import Sequence

from core.batch.batch import Batch
from core.batch.request import Request
from core.batch.table import RequestStart
from core.kv.swap_space import SwapSpace
from ipc.tables.arrays import Int32s


class SwappedStates:
    """Slots for `count` states, of which the first has the number `first` in plans."""

    def __init__(self, batch: Batch, first: int, count: int) -> None:
        self._batch, self._first = batch, first
        self.space = SwapSpace(count)

    def can_take(self, row: int, num_tokens: int) -> bool:
        """Return whether the row's state, if it is that after num_tokens tokens, can be copied."""
        table = self._batch.table
        is_exact = int(table.num_computed_tokens[row]) == num_tokens
        return is_exact and self.space.num_free > 0 and not any(row in rows for _, rows, _ in self._batch.in_flight)

    def take(self, row: int) -> Int32s:
        """Copy the row's state, and return its slot [1]."""
        slots = self.space.take(1)
        self._batch.carried.states.add(row, self._first + int(slots[0]))
        return slots

    def begin(self, starts: Sequence[RequestStart]) -> None:
        """Copy the states of resuming requests to their new rows."""
        for start in starts:
            if start.swapped_state is not None:
                self._batch.carried.states.add(self._first + start.swapped_state, start.request.row)

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Check that no slot is lost or held twice. Errors: AssertionError."""
        self.space.check_integrity([one.swapped.states for one in requests if one.swapped is not None])
