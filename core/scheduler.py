"""Scheduler: which tokens of which requests run in the next step.

There is no prefill phase and no decode phase. A request has num_tokens (prompt, output, and what steps in flight will
sample) and num_computed_tokens; each step gives it the difference, out of a token budget. Chunked prefill, prefix hits,
resumption after preemption and plain decode are this one subtraction, done for all running rows as columns.
Python touches a single request only on an event: it arrives, starts, fills a block, is preempted, ends.
"""

from collections import deque

import numpy as np

from core.batch_table import BatchTable
from core.block_pool import BlockPool
from core.outputs import Addressed, OutputColumns
from core.plan import FAILED_TOKEN, ModelRunnerOutput, NewRow, SchedulerOutput
from core.prefix_cache import PrefixCache
from core.request import NO_ROW, Request
from core.request_index import RequestIndex
from core.scheduler_stats import SchedulerStats
from core.stop_check import StopCheck
from core.waiting_queue import WaitingQueue
from ipc.config import EngineConfig
from ipc.messages import ErrorCode, FinishReason, PauseMode
from ipc.paged_rows import Int32s, Ints


class _Draft:
    """The plan being made."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.added: list[NewRow] = []
        self.block_rows: Ints = np.zeros(0, np.int64)
        self.block_ids: Int32s = np.zeros(0, np.int32)
        self.rows: Ints = np.zeros(0, np.int64)
        self.counts: Ints = np.zeros(0, np.int64)
        self.has_preempted = False


class Scheduler:
    """Pure: no tensors, no sockets, no clock (now_ns is handed in), no randomness, no order of sets.

    `schedule` may be called again before the last plan's result is known; `update_from_output` takes the results in
    step order. Invariants, checked by check_integrity(): the running list is in arrival order; the oldest running
    request is never preempted; a plan holds only rows whose blocks cover what it schedules.
    """

    def __init__(self, config: EngineConfig, eos_token_ids: tuple[int, ...], epoch: int = 0) -> None:
        assert config.max_model_len is not None, "the config is not resolved"
        assert config.num_blocks_override is not None, "the config is not resolved"
        capacity = (config.num_blocks_override - 1) * config.block_size
        assert config.max_model_len <= capacity, f"max_model_len {config.max_model_len} exceeds {capacity} cache slots"
        self.block_size = config.block_size
        self.max_num_seqs = config.max_num_seqs
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.resume()
        self.table = BatchTable(config.max_num_seqs)
        self.pool = BlockPool(config.num_blocks_override)
        self.waiting = WaitingQueue()
        self.running: Ints = np.zeros(0, np.int64)  # rows in arrival order
        self.stats = SchedulerStats()
        self.outputs = OutputColumns(epoch)
        self._prefix_cache = PrefixCache(self.table, self.pool, config.block_size, config.enable_prefix_caching)
        self._stop_check = StopCheck(self.table, eos_token_ids)
        self._requests = RequestIndex()
        self._removed_rows: list[int] = []  # since the last plan that ran
        self._in_flight: deque[tuple[int, Ints]] = deque()  # (step, tenancy of the plan's rows)
        self._step = 0

    # --- requests ------------------------------------------------------------------------------------------------

    def add_request(self, choices: list[Request], deadline_ns: int = 0) -> None:
        """Queue the choices of one validated message, which share their blocks as far as the prefix cache has them; a
        number that lives already in the client's session is refused to its sender."""
        client, number = choices[0].client, choices[0].number
        if self._requests.get(client, number):
            text = f"request number {number} is still running in this session; numbers are never reused"
            self.outputs.add_failed(client, number, ErrorCode.ALREADY_EXISTS, text)
            return
        for request in choices:
            finish = self._stop_check.of_delivered(request)
            if finish:  # the client has all of its tokens already
                self.outputs.add_finish(request, request.num_output_tokens, finish)
            else:
                self._requests.add(request, deadline_ns)
                self.waiting.append(request)

    def finish_requests(self, client: int, numbers: list[int], choices: list[int] | None = None) -> None:
        """Abort these requests of a client, or of each only the choice beside it; what is unknown or finished is
        ignored."""
        for index, number in enumerate(numbers):
            for request in self._requests.get(client, number):
                if choices is None or request.choice in choices[index : index + 1]:
                    self._take_out(request)
                    self.outputs.add_finish(request, request.num_output_tokens, FinishReason.ABORT)

    def finish_client(self, client: int) -> None:
        """The client is gone: its requests end and nobody is told."""
        for request in self._requests.of_client(client):
            self._take_out(request)
        self.waiting.release(client)

    def hold_client(self, client: int) -> None:
        """The client does not read: its requests wait, and nobody pays for that. Their rows and blocks are given back;
        the prefix cache remembers the blocks as long as nobody needs the room."""
        requests = self._requests.of_client(client)
        for row in [request.row for request in requests if request.row != NO_ROW]:
            self._free_row(row)
        self.waiting.hold(client, requests)

    def release_client(self, client: int, serial: int) -> int:
        """The client reads again: its requests queue up as if they came now, with serials from `serial` on. Returns how
        many they are."""
        released = self.waiting.release(client)
        for request in released:
            request.serial = serial
            serial += 1
            self.waiting.append(request)
        return len(released)

    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting)."""
        return len(self.running), len(self.waiting)

    @property
    def has_unfinished_requests(self) -> bool:
        return len(self.running) > 0 or len(self.waiting) > 0

    @property
    def has_work(self) -> bool:
        """False: steps change nothing until a message or a deadline comes."""
        may_start = self._row_limit > 0 and self.waiting.num_ready > 0
        return self._token_budget > 0 and (len(self.running) > 0 or may_start)

    def pause(self, mode: PauseMode) -> None:
        """Let nothing start, or nothing run; aborts and deadlines end requests all the same."""
        self._row_limit = 0
        self._token_budget = 0 if mode == PauseMode.ALL else self.max_num_batched_tokens

    def resume(self) -> None:
        self._row_limit = self.max_num_seqs
        self._token_budget = self.max_num_batched_tokens

    def reset_prefix_cache(self) -> None:
        """Forget what all blocks hold; requests that run keep theirs, and nobody else finds them."""
        self.pool.forget()

    def take_outputs(self) -> list[Addressed]:
        """What there is to tell without a result: refusals, aborts."""
        return self.outputs.drain(self._step)

    # --- a step --------------------------------------------------------------------------------------------------

    def schedule(self, now_ns: int) -> SchedulerOutput:
        """The next plan; empty when there is nothing to run. num_computed_tokens advances here, before it runs."""
        self._fail_overdue(now_ns)
        draft = _Draft(self._step)
        budget = self._grow_running(draft)
        if not draft.has_preempted:
            self._admit_waiting(draft, budget)
        return self._commit(draft)

    def update_from_output(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[Addressed]:
        """Append the sampled tokens, end what has to end, and return what the clients are to be told."""
        step, tenancies = self._in_flight.popleft()
        assert step == plan.step == output.step, f"step {step} is due, got plan {plan.step} and output {output.step}"
        self.pool.lift_fences(step)
        live = self.table.tenancy[plan.rows] == tenancies  # the others were aborted or preempted meanwhile
        if output.logprobs is not None:
            told = output.logprobs.where((live & (output.token_ids != FAILED_TOKEN))[output.logprobs.rows])
            self.outputs.add_logprobs(*self._address(plan.rows[told.rows]), told)
        self._fail_rows(plan.rows[live & (output.token_ids == FAILED_TOKEN)])
        live = self.table.tenancy[plan.rows] == tenancies  # the other choices of what has failed are gone too
        sampled = live & (output.token_ids >= 0)
        rows, tokens = plan.rows[sampled], output.token_ids[sampled]
        self.table.append_tokens(rows, tokens)
        finish, by_stop_token = self._stop_check(rows, tokens)
        table = self.table
        positions = table.num_tokens[rows] - 1 - table.num_prompt_tokens[rows]
        self.outputs.add_tokens(*self._address(rows), positions, tokens, finish, by_stop_token)
        self.stats.num_generation_tokens += len(rows)
        for row in rows[finish > 0].tolist():
            request = table.request[row]
            assert request is not None, f"row {row} ends twice"
            self._take_out(request)
            self.stats.num_finished += 1
        return self.outputs.drain(step)

    def _address(self, rows: Ints) -> tuple[Ints, Ints, Ints]:
        """(client, number, choice) of each row."""
        return self.table.client[rows], self.table.number[rows], self.table.choice[rows]

    # --- running rows --------------------------------------------------------------------------------------------

    def _grow_running(self, draft: _Draft) -> int:
        """Give every running row its tokens, oldest first; preempt the youngest while blocks are short. Returns the
        budget that is left."""
        while True:
            rows = self.running
            counts = self._wanted(rows)
            ends = self.table.num_computed_tokens[rows] + counts
            needs = np.maximum(-(-ends // self.block_size) - self.table.num_blocks[rows], 0)
            shortage = int(needs.sum()) - self.pool.num_free
            if shortage <= self.pool.num_fenced:
                break
            assert len(rows) > 1, (
                f"one request needs {needs} blocks, {self.pool.num_free} of {self.pool.num_blocks} free"
            )
            self._preempt(int(rows[-1]))
            draft.has_preempted = True
        if shortage > 0:  # blocks will come free when the fences lift: who does not fit now waits a step
            fits = (np.cumsum(needs) <= self.pool.num_free) | (needs == 0)
            counts, needs = np.where(fits, counts, 0), np.where(fits, needs, 0)
        growing = needs > 0
        if growing.any():
            draft.block_ids = self.pool.allocate(int(needs.sum()))
            draft.block_rows = self.table.append_blocks(rows[growing], needs[growing], draft.block_ids)
        scheduled = counts > 0
        draft.rows, draft.counts = rows[scheduled], counts[scheduled]
        return self._token_budget - int(counts.sum())

    def _wanted(self, rows: Ints) -> Ints:
        """Tokens for each row, cut where the budget ends."""
        table = self.table
        known = table.num_tokens[rows] + table.num_placeholders[rows]
        wanted = known - table.num_computed_tokens[rows]
        # A row whose last token is being sampled by a step in flight has nothing left to compute.
        wanted[(known >= table.max_total_tokens[rows]) & (table.num_placeholders[rows] > 0)] = 0
        before = np.cumsum(wanted) - wanted
        wanted_in_budget: Ints = np.clip(self._token_budget - before, 0, wanted)
        return wanted_in_budget

    def _preempt(self, row: int) -> None:
        """Back to the head of the queue; the request is computed again, as far as the prefix cache has forgotten it.

        A token that a step in flight samples for it is dropped and sampled again: same ids, same position, same token.
        """
        request = self._free_row(row)
        self.waiting.prepend(request)
        self.stats.num_preemptions += 1

    # --- waiting requests ----------------------------------------------------------------------------------------

    def _admit_waiting(self, draft: _Draft, budget: int) -> None:
        """Start waiting requests, in order, while budget, rows and blocks last; a head that does not fit holds the
        rest."""
        rows: list[int] = []
        counts: list[int] = []
        promised = self._promised_blocks() if len(self.waiting) else 0
        while budget > 0 and len(self.running) + len(rows) < self._row_limit:
            request = self.waiting.head()
            if request is None:
                break
            hits = self._prefix_cache.find(request)
            total = -(-request.num_tokens // self.block_size)
            available = self.pool.num_free - self.pool.num_revived(hits) - promised
            if total - len(hits) > available:
                break
            self.waiting.pop_head()
            cached = len(hits) * self.block_size
            count = min(request.num_tokens - cached, budget)
            row, given = self._start(draft, request, hits, cached + count)
            rows.append(row)
            counts.append(count)
            budget -= count
            promised += total - given
        if rows:
            self.running = np.concatenate([self.running, np.array(rows)])
            draft.rows = np.concatenate([draft.rows, np.array(rows)])
            draft.counts = np.concatenate([draft.counts, np.array(counts)])

    def _promised_blocks(self) -> int:
        """Blocks that running requests still need for tokens they have: starting others must not take them."""
        rows = self.running
        total = -(-self.table.num_tokens[rows] // self.block_size)
        return int(np.maximum(total - self.table.num_blocks[rows], 0).sum())

    def _start(self, draft: _Draft, request: Request, hits: Int32s, end: int) -> tuple[int, int]:
        """Give the request a row and blocks for its first `end` tokens; returns the row and its number of blocks."""
        self.pool.hold(hits)
        cached = len(hits) * self.block_size
        block_ids = np.concatenate([hits, self.pool.allocate(-(-end // self.block_size) - len(hits))])
        row = self.table.add(request, cached, block_ids, len(hits))
        self._prefix_cache.name_started_blocks(row, end)
        if request.params.stop_token_ids:
            self._stop_check.add(row, request.params.stop_token_ids)
        draft.added.append(
            NewRow(
                row,
                request.token_ids,
                request.num_prompt_tokens,
                cached,
                block_ids,
                request.params,
                request.seed,
                request.choice,
            )
        )
        if not request.has_started:
            request.has_started = True
            if request.choice == 0:  # the others find the prompt's blocks because of it
                self.outputs.add_started(request, cached)
            self.stats.count_start(request, cached)
        return row, len(block_ids)

    # --- the plan ------------------------------------------------------------------------------------------------

    def _commit(self, draft: _Draft) -> SchedulerOutput:
        table, rows, counts = self.table, draft.rows, draft.counts
        if not len(rows):
            return _plan(draft, [])  # does not run: removed rows are told in the next one that does
        self._step += 1
        ends = table.num_computed_tokens[rows] + counts
        table.num_computed_tokens[rows] = ends
        table.num_placeholders[rows] += ends == table.num_tokens[rows] + table.num_placeholders[rows]
        self._prefix_cache.name_full_blocks(rows)
        self._in_flight.append((draft.step, table.tenancy[rows]))
        self.stats.count_step(rows, counts, self.pool)
        removed, self._removed_rows = self._removed_rows, []
        return _plan(draft, removed)

    # --- ends ----------------------------------------------------------------------------------------------------

    def _fail_rows(self, rows: Ints) -> None:
        """Requests whose logits were not finite fail alone; nobody is to find what they have stored."""
        for row in rows.tolist():
            self.pool.forget_names(self.table.block_ids(row))
        for row in rows.tolist():
            request = self.table.request[row]
            if request is None:  # another choice of its request has failed before it
                continue
            text = "the logits of this request are not finite (NaN or infinity), or its parameters forbid every token"
            self._fail(request, ErrorCode.INTERNAL, text)

    def _fail_overdue(self, now_ns: int) -> None:
        for request in self._requests.pop_overdue(now_ns):
            if not request.is_finished:  # with another choice of it
                self._fail(request, ErrorCode.DEADLINE_EXCEEDED, "the request's deadline has passed")

    def _fail(self, request: Request, code: ErrorCode, text: str) -> None:
        """With all choices of its number."""
        for choice in self._requests.get(request.client, request.number):
            self._take_out(choice)
        self.outputs.add_failed(request.client, request.number, code, text)

    def _take_out(self, request: Request) -> None:
        """The request leaves the scheduler, wherever it is."""
        if request.row == NO_ROW:
            self.waiting.discard(request)
        else:
            self._free_row(request.row)
            request.is_finished = True
        self._requests.remove(request)

    def _free_row(self, row: int) -> Request:
        fence = self._in_flight[-1][0] if self._in_flight else None
        self.pool.free(self.table.block_ids(row)[::-1], fence)
        if self.table.has_stop_ids[row]:
            self._stop_check.remove(row)
        self.running = self.running[self.running != row]
        self._removed_rows.append(row)
        return self.table.remove(row)

    def check_integrity(self) -> None:
        """AssertionError with the numbers when anything disagrees with anything."""
        self.table.check_integrity(self.running)
        self.pool.check_integrity([self.table.block_ids(row) for row in self.running.tolist()])
        counts = (len(self._requests), len(self.running), len(self.waiting))
        assert counts[0] == counts[1] + counts[2], f"(live, running, waiting) = {counts}"
        serials = [r.serial for row in self.running.tolist() if (r := self.table.request[row]) is not None]
        assert serials == sorted(serials), f"running out of arrival order: {serials}"


def _plan(draft: _Draft, removed_rows: list[int]) -> SchedulerOutput:
    def column(values: Ints | list[int]) -> Int32s:
        return np.asarray(values).astype(np.int32, copy=False)

    return SchedulerOutput(
        step=draft.step,
        removed_rows=column(removed_rows),
        added=draft.added,
        block_rows=column(draft.block_rows),
        block_ids=draft.block_ids,
        rows=column(draft.rows),
        num_scheduled_tokens=column(draft.counts),
    )
