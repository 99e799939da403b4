"""Ends: how requests leave the scheduler: finished, aborted or failed."""

import numpy as np

from core.batch.index import RequestIndex
from core.batch.request import NO_ROW, Request
from core.execution.plan import ModelRunnerOutput, PooledColumns
from core.scheduling.leads import Leads
from core.scheduling.parties import Parties
from core.scheduling.parts import SchedulerParts
from core.scheduling.preemption import Preemption
from ipc.tables.arrays import Bools, Rows
from ipc.wire.messages import ErrorCode

#: The most requests that one step fails because their deadlines have passed: each costs 10 microseconds.
MAX_OVERDUE = 512
#: Error text for a failed row that has no text of its own.
_NOT_FINITE = "this request's logits or vectors are not finite (NaN, infinity), or its parameters forbid every token"


class Ends:
    """The removal of requests from all parts of the scheduler."""

    def __init__(
        self, parts: SchedulerParts, preemption: Preemption, *, requests: RequestIndex, parties: Parties, leads: Leads
    ) -> None:
        self._batch, self._waiting, self._policy = parts.batch, parts.waiting, parts.policy
        self._preemption = preemption
        self._outputs, self._stats = parts.outputs, parts.stats
        self._requests, self._parties, self._leads = requests, parties, leads

    def fail_rows(self, rows: Rows, failed: Bools, output: ModelRunnerOutput) -> None:
        """Fail the requests of the rows in the mask, each with its text. Their blocks can no longer be found."""
        table = self._batch.table
        failing, texts = np.flatnonzero(failed).tolist(), dict(output.failures)
        for index in failing:
            self._batch.pool.forget_names(table.block_ids(int(rows[index])))
        for index in failing:
            request = table.request[int(rows[index])]
            if request is not None:  # None: another choice of its request failed first
                # a text means that a parameter is to blame
                code = ErrorCode.INVALID_ARGUMENT if index in texts else ErrorCode.NUMERIC
                self.fail(request, code, texts.get(index, _NOT_FINITE))

    def fail_overdue(self, now_ns: int) -> None:
        """Fail the requests whose deadlines have passed, at most MAX_OVERDUE of them."""
        for request in self._requests.pop_overdue(now_ns, MAX_OVERDUE):
            if not request.is_finished:  # it may have failed with another choice
                self.fail(request, ErrorCode.DEADLINE_EXCEEDED, "the request's deadline has passed")

    def fail(self, request: Request, code: ErrorCode, text: str) -> None:
        """Fail the request and all its choices, and report it to the client."""
        for choice in self._requests.get(request.client, request.number):
            self.take_out(choice)
        self._outputs.add_failed(request.client, request.number, code, text)

    def take_out(self, request: Request) -> None:
        """Remove the request from the scheduler, whether it runs or waits."""
        if request.row == NO_ROW:
            self._waiting.discard(request)
            self._preemption.end(request)
        else:
            self._preemption.undo_recompute_count(request.row)
            self._batch.release(np.array([request.row]))
        self._forget([request])

    def finish(self, rows: Rows) -> None:
        """End the requests of these rows, which have all their tokens."""
        if self._leads:
            ending = [self._batch.table.request[row] for row in rows.tolist()]
            for request in [request for request in ending if request is not None and request.choices]:
                self._leads.finish(request)
        self._forget(self._batch.release(rows))
        self._stats.num_finished += len(rows)

    def finish_pooled(self, rows: Rows, live: Bools, output: ModelRunnerOutput, pooled: PooledColumns) -> None:
        """End the pooling requests whose vectors have arrived. live [R]: the live ones of a plan's rows [R].

        A request without vectors fails.
        """
        self.fail_rows(rows, live & np.isin(np.arange(len(rows)), pooled.rows[pooled.counts == 0]), output)
        pooled = pooled.where(live[pooled.rows] & (pooled.counts > 0))
        if len(ended := rows[pooled.rows]):
            self._outputs.add_pooled(*self._batch.table.address(ended), pooled)
            self.finish(ended)

    def _forget(self, requests: list[Request]) -> None:
        ended = requests
        if held := self._waiting.held_clients:
            ended = [request for request in requests if request.client not in held]
        self._policy.end(ended)
        for request in requests:
            request.is_finished = True
            if request.tenant:
                self._parties.leave(request)
            if request.choices:
                self._leads.end(request)
        self._requests.remove(requests)
