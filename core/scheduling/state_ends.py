"""StateEnds: ends chunks of prompts at positions where a recurrent state is worth keeping.

core/batch/kept_states.py keeps the states, and a request resumes from the last block that has one. So a prompt's last
chunk starts at its last whole block. Another chunk ends where the prefix cache has K and V of the prompt's tokens but
no state: at that position prompts with the same beginning diverge. Chunks that the budget cuts end at a block boundary.
"""

from collections.abc import Callable

import numpy as np

from core.batch.batch import Batch
from core.batch.kept_states import KeptStates
from core.batch.table import RequestStart
from core.scheduling.decisions import Examined
from core.scheduling.draft import Draft
from core.scheduling.limits import Limit
from ipc.tables.arrays import Ints

#: A chunk is split only if it saves recomputing at least this many tokens; fewer cost less than a step.
LEAST_TOKENS = 64


class StateEnds:
    """A Limit that cuts chunks of prompts, and never blocks a request."""

    def __init__(self, batch: Batch, add_limit: Callable[[Limit], None]) -> None:
        """add_limit: admission's."""
        self._batch = batch
        add_limit(self)

    def lacks(self, start: RequestStart, draft: Draft) -> Examined | None:
        """Cut the start's tokens, and return None."""
        request, begin = start.request, start.num_computed_tokens
        request.known_end = len(self._batch.prefix_cache.find(request, needs_state=False)[0]) * self._batch.block_size
        end = self._end(begin, begin + start.num_tokens, request.num_tokens, request.known_end)
        start.num_tokens = end - begin
        return None

    def take(self, start: RequestStart, draft: Draft) -> None:
        """Do nothing: no resource is held."""

    def give_back(self, request: object) -> None:
        """Do nothing."""

    def cut(self, draft: Draft) -> None:
        """Cut the tokens of running rows that have several. They keep their blocks."""
        table, rows, counts = self._batch.table, draft.rows, draft.counts
        begins: Ints = table.num_computed_tokens[rows]
        for index in np.flatnonzero(counts > 1).tolist():
            row, begin, given = int(rows[index]), int(begins[index]), int(counts[index])
            request = table.request[row]
            assert request is not None, f"row {row} is free"
            end = self._end(begin, begin + given, int(table.num_tokens[row]), request.known_end)
            counts[index] = end - begin
            draft.budget += begin + given - end

    def _end(self, begin: int, end: int, length: int, known_end: int) -> int:
        """Return where the chunk from `begin` to `end` of a request of `length` tokens should end, after `begin`."""
        size = self._batch.block_size
        for place in (known_end, (length - 1) // size * size):
            if begin + LEAST_TOKENS <= place < end:
                return place
        whole = end // size * size
        return whole if begin < whole and end < length else end


def keep_states(batch: Batch, add_limit: Callable[[Limit], None], num_rows: int, num_slots: int) -> StateEnds:
    """Let the batch keep up to num_slots states, and let the prefix cache find their prefixes."""
    kept = KeptStates(batch.table, batch.pool.names, num_rows, num_slots)
    batch.kept_states = batch.prefix_cache.kept_states = kept
    batch.forks.least_shared = LEAST_TOKENS + batch.block_size
    return StateEnds(batch, add_limit)
