"""Limit: the interface of a resource that waiting requests need to start and running requests may hold."""

from typing import Protocol

import numpy as np

from core.batch.request import Request
from core.batch.table import BatchTable, RequestStart
from core.scheduling.decisions import Examined, Verdict
from core.scheduling.draft import Draft
from core.scheduling.policies import Policy


class Limit(Protocol):
    """A resource that admission checks before it preempts any row for a request.

    The request starts if no limit lacks anything. Rows, blocks and the token budget are not Limits, because admission
    frees them by preemption. A limit must let a request start if nothing is running; otherwise the engine would examine
    its queue forever.
    """

    def lacks(self, start: RequestStart, draft: Draft) -> Examined | None:
        """Return what the request lacks to start in this step, or None.

        A verdict above HOLDS_THE_REST lets at most `admission_lookahead` of the requests behind it pass.
        """
        ...

    def take(self, start: RequestStart, draft: Draft) -> None:
        """Count the request: it starts in this step."""
        ...

    def give_back(self, request: Request) -> None:
        """Stop counting the request, because it has lost its row: it ended, was preempted, or its client is on hold."""
        ...


class PartialPrefills:
    """A limit of max_num_partial_prefills prompts that need more steps.

    Running partial prompts are counted in the batch table. Those that must yield to a request do not count for it.
    """

    def __init__(self, table: BatchTable, policy: Policy, max_partial: int) -> None:
        self._table = table
        self._policy = policy
        self._max = max_partial
        self._draft: Draft | None = None  # the step being planned
        self._num_starting = 0  # partial prompts that start in that step

    def lacks(self, start: RequestStart, draft: Draft) -> Examined | None:
        """Return PARTIAL_PREFILLS for a prompt that would be cut if the limit is reached."""
        if start.num_tokens == start.num_missing_tokens:
            return None
        starting = self._num_starting if self._draft is draft else 0
        if starting + self._num_running(start.request, draft) < self._max:
            return None
        return Examined(start.request, Verdict.PARTIAL_PREFILLS, 1, 0)

    def take(self, start: RequestStart, draft: Draft) -> None:
        """Count the request if its prompt is cut."""
        if self._draft is not draft:
            self._draft, self._num_starting = draft, 0
        self._num_starting += start.num_tokens < start.num_missing_tokens

    def give_back(self, request: Request) -> None:
        """Do nothing: running partial prompts are counted in the table."""

    def _num_running(self, request: Request, draft: Draft) -> int:
        table, rows = self._table, draft.rows
        is_partial = table.num_tokens[rows] - table.num_computed_tokens[rows] - draft.counts > 1
        return int(np.count_nonzero(is_partial & ~self._policy.must_yield(request, rows)))
