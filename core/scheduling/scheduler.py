"""Scheduler: which tokens of which requests run in the next step.

There is no prefill phase and no decode phase. A request has num_tokens (prompt, output, and the tokens that steps in
flight will sample) and num_computed_tokens. Each step gives it the difference, out of a token budget. Chunked prefill,
prefix hits, resumption after preemption and plain decode are this one subtraction, done for all running rows as
columns. Python code touches a single request only on an event: it arrives, starts, is preempted or ends.
"""

from collections.abc import Callable, Mapping

import numpy as np

from core.batch.batch import Batch
from core.batch.carried import NOTHING_CARRIED
from core.batch.index import RequestIndex
from core.batch.kept_states import LEAST_TOKENS, KeptStates
from core.batch.request import NO_ROW, Request
from core.execution.executor import ModelInfo
from core.execution.plan import FAILED_TOKEN, ModelRunnerOutput, SchedulerOutput
from core.execution.state_slots import most_drafts, num_state_slots, num_swap_states
from core.scheduling.adapter_slots import AdapterSlots
from core.scheduling.admission import Admission
from core.scheduling.beams.beam_searches import BeamSearches
from core.scheduling.beams.group_rows import GroupRows
from core.scheduling.block_exchange import make_exchange
from core.scheduling.decisions import Decision
from core.scheduling.draft import Draft, finish_plan
from core.scheduling.encoder_inputs import EncoderInputs
from core.scheduling.ends import Ends
from core.scheduling.exchange_beside import StatesBeside
from core.scheduling.leads import Leads
from core.scheduling.outputs import ClientOutput, OutputCollector
from core.scheduling.parties import Parties
from core.scheduling.parts import SchedulerParts
from core.scheduling.pins.pins import Pins
from core.scheduling.policies import BuildPolicy, build_policy
from core.scheduling.preemption import Preemption
from core.scheduling.running_rows import RowsInTurn, running_rows
from core.scheduling.speculation import Speculation
from core.scheduling.stats import new_stats, statistics
from core.scheduling.swapped_states import SwappedStates
from core.scheduling.waiting_queue import WaitingQueue
from core.scheduling.weight_update import WeightUpdate
from core.scheduling.whole_features import WholeFeatures
from ipc.options.resolved import ResolvedConfig
from ipc.tables.arrays import AnyInts, Bools, Int32s, Ints, Rows, TokenIds, UInt8s
from ipc.tables.rounding import ceil_div
from ipc.wire.messages import ErrorCode, FinishReason, PauseMode, Statistics
from ipc.wire.weights_messages import WeightsMark


class Scheduler:
    """The built-in scheduler, pure as core/scheduling/interface.py asks. policy: creates another scheduling policy.

    `schedule` may be called again before the last plan's result is known. `update_from_output` takes the results in
    step order. Invariants, checked by check_integrity(): every request is in one place; rows are in the policy's
    order; blocks are owned as the tables say; a plan holds only rows whose blocks cover what it schedules.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        eos_token_ids: tuple[int, ...],
        epoch: int = 0,
        *,
        policy: BuildPolicy = build_policy,
    ) -> None:
        self.block_size, self.max_num_seqs = config.block_size, config.max_num_seqs
        self.max_num_batched_tokens = self._token_budget = config.max_num_batched_tokens
        self.stats, self.outputs, self.batch = new_stats(), OutputCollector(epoch), Batch(config, eos_token_ids)
        self.table, self.pool, self.cuts = self.batch.table, self.batch.pool, list[Callable[[Draft], None]]()
        self.policy = policy(config, self.table)
        self.waiting, self._requests = WaitingQueue(self.policy.line), RequestIndex()
        parts = SchedulerParts(config, self.batch, self.waiting, self.policy, self.outputs, self.stats)
        self.preemption = Preemption(parts)
        self._running_rows = running_rows(parts, self.preemption)
        self.takes_turns = isinstance(self._running_rows, RowsInTurn)  # rows, see there
        self.admission = Admission(parts, self.preemption)
        if config.enable_lora:
            self.admission.add_limit(AdapterSlots(config.max_loras))
        self.speculation = Speculation(parts, self.admission.num_watermark_blocks)
        self.starts_alone = not config.enable_chunked_prefill
        self._fill = self._prompts_first if self.starts_alone else self._running_first
        self.exchange = self.admission.exchange = make_exchange(config, self.batch, self.waiting)
        self._parties = Parties(self.policy, config.client_weights)
        self._leads = Leads(self.table, self.batch.forks, self.waiting)
        self._ends = Ends(parts, self.preemption, requests=self._requests, parties=self._parties, leads=self._leads)
        self.weights = WeightUpdate(parts, self.preemption, self._ends, self._requests)
        self.pins = Pins(parts, self._ends, self.cuts, self.exchange)
        self.beams = BeamSearches(
            parts,
            self.preemption,
            self._ends,
            eos_token_ids=eos_token_ids,
            num_watermark_blocks=self.admission.num_watermark_blocks,
        )
        self._group_rows: GroupRows | None = None  # created by the first beam search
        self._wholes = WholeFeatures(self.batch, self.admission.add_limit, self.cuts)
        self.encoder_inputs = EncoderInputs(parts, self.admission.add_limit, self.cuts)
        self.has_executor, self._step = True, 0  # has_executor: whether it can take plans
        self.decision: Decision | None = None  # the last step's
        self.num_common_blocks = 0  # of the last plan that ran

    def keep_states(self, config: ResolvedConfig, info: ModelInfo) -> None:
        """Let requests of a model with recurrent layers start from kept states instead of other requests' rows.

        A copied row gets a copy of its state. A step has at most as many drafts as there are slots for the states
        before them.
        """
        batch, state_bytes = self.batch, info.state_bytes
        self.preemption.state_blocks = ceil_div(info.state_tokens, self.block_size)
        batch.on_copy.append(batch.copy_state)
        self.speculation.most_in_step = most_drafts(config, state_bytes)
        batch.forks.is_off, batch.forks.least_shared = True, config.max_model_len
        num_slots, num_swapped = num_state_slots(config, state_bytes), num_swap_states(config, state_bytes)
        self.preemption.states = SwappedStates(batch, config.max_num_seqs + num_slots, num_swapped)
        assert num_slots or not config.enable_prefix_caching, "the config is not resolved"
        if num_slots:
            kept = KeptStates(self.table, self.pool.names, config.max_num_seqs, num_slots)
            batch.kept_states = batch.prefix_cache.kept_states = kept
            batch.prefix_cache.host = batch.host_cache if batch.host_cache.num_slots else None
            batch.forks.least_shared = LEAST_TOKENS + self.block_size
            if self.exchange is not None:
                self.exchange.beside = StatesBeside(batch, kept)

    # --- requests ------------------------------------------------------------------------------------------------

    def add_request(self, choices: list[Request], now_ns: int, deadline_ns: int = 0) -> None:
        """Queue the choices of one validated message. They share their blocks as far as the prefix cache has them.

        The client gets ALREADY_EXISTS for a number that is live in its session, and INVALID_ARGUMENT for a request that
        could never run.
        """
        client, number = choices[0].client, choices[0].number
        if self._requests.has(client, number):
            text = f"request number {number} is still running in this session; numbers are never reused"
            self.outputs.add_failed(client, number, ErrorCode.ALREADY_EXISTS, text)
            return
        is_search = choices[0].searches
        reason = self.admission.never_fits(choices[0])
        if is_search:
            reason = reason or self.beams.never_fits(choices, self.max_num_seqs)
        if reason:
            self.outputs.add_failed(client, number, ErrorCode.INVALID_ARGUMENT, reason)
            return
        over = []
        for request in choices:
            finish, stop_token = self.batch.stop_check.finish_of_delivered(request)
            if finish:  # the message came with all of its tokens
                self.outputs.add_finish(request, request.num_output_tokens, finish, stop_token)
                over.append(request)
        live = [request for request in choices if request not in over] if over else choices
        if len(live) > 1 or is_search:
            self._leads.enter(live)
        if is_search:
            self._enter_search(live)
        if choices[0].features:
            self._wholes.enter(choices[0])
            if self.encoder_inputs.enter(choices[0]) and not self.starts_alone:
                self._fill = self._images_first
        for request in live:
            request.arrival_ns = now_ns
            if request.tenant:
                self._parties.enter(request)
            self._requests.add(request, deadline_ns)
            if not self.waiting.is_held(client):  # otherwise it arrives with the client's others when the hold ends
                self.policy.arrive(request)
            self.batch.prefix_cache.prepare(request)
            self.waiting.push(request)
        for pin in choices[0].pins:
            self.pins.enter(pin, live, now_ns)

    def _enter_search(self, requests: list[Request]) -> None:
        if self._group_rows is None:
            self._group_rows = GroupRows(self.batch, self.admission, self.max_num_seqs)
            self.admission.add_limit(self._group_rows)
        self.beams.enter(requests)

    def finish_requests(self, client: int, numbers: list[int], choices: list[int] | None = None) -> None:
        """Abort these requests of a client; with choices, only choices[i] of numbers[i]. Ignore unknown ones."""
        for index, number in enumerate(numbers):
            for request in self._requests.get(client, number):
                if choices is None or request.choice in choices[index : index + 1]:
                    # The number of tokens that the client has received. A beam search reports its tokens at its end.
                    num_output_tokens = 0 if request.searches else self.table.num_output_tokens(request)
                    self._ends.take_out(request)
                    if request.choice < request.params.n:  # otherwise it is a beam beyond the answers
                        self.outputs.add_finish(request, num_output_tokens, FinishReason.ABORT)

    def finish_client(self, client: int) -> None:
        """End all requests of a client that is gone, without reporting anything."""
        for request in self._requests.of_client(client):
            self._ends.take_out(request)
        self.waiting.release(client)
        self.policy.forget(client)

    def hold_client(self, client: int, now_ns: int = 0) -> None:
        """Make all requests of a client that does not read wait, and free their rows and blocks.

        The prefix cache can still find the blocks until they are allocated again.
        """
        requests = self._requests.of_client(client)
        for row in [request.row for request in requests if request.row != NO_ROW]:
            self.preemption.undo_recompute_count(row)
            request = self.batch.release_to_wait(row)
            self.outputs.events.add_hold(request, now_ns)
            self.waiting.push(request)
        if not self.waiting.is_held(client):
            for request in requests:
                self.preemption.end(request)  # swap space is kept for requests that resume soon
            self.policy.end(requests)  # a client on hold must not accumulate a share
        self.waiting.hold(client, requests)

    def release_client(self, client: int, serial: int, now_ns: int = 0) -> int:
        """End a client's hold and return the number of its requests. They are queued as if they arrived now.

        Their serials are `serial`, `serial` + 1, ...
        """
        released = self.waiting.release(client)
        for request in released:
            request.serial, request.arrival_ns = serial, now_ns
            serial += 1
            self.policy.arrive(request)
            self.waiting.push(request)
        return len(released)

    def set_weight(self, client: int, weight: float) -> None:
        """Set the client's share under policy fair; clients without a weight have 1."""
        self.policy.set_weight(client, weight)

    def live_requests(self) -> list[Request]:
        """Return all live requests; O(n)."""
        return self._requests.all()

    def rename_tenants(self, word: Callable[[str], str], weights: Mapping[str, float]) -> None:
        """Rename the tenants, and set their weights under the new names."""
        self._parties.rename(word, weights)

    def find(self, client: int, number: int) -> list[Request]:
        """Return the live choices of a request; empty if there are none."""
        return self._requests.get(client, number)

    def get_request_counts(self) -> tuple[int, int]:
        """Return the numbers of requests (running, waiting)."""
        return len(self.batch), len(self.waiting)

    @property
    def pause_mode(self) -> PauseMode | None:
        """Return the mode of the current pause, or None."""
        mode = PauseMode.NEW if self._token_budget else PauseMode.ALL
        return mode if self.waiting.is_shut and not self.weights.reopens else None

    @property
    def running(self) -> Ints:
        """Return the rows of running requests, in order of rank and arrival."""
        return self.batch.rows

    @property
    def has_unfinished_requests(self) -> bool:
        """Return whether any request runs or waits."""
        return len(self.batch) > 0 or len(self.waiting) > 0

    @property
    def has_finished_requests(self) -> bool:
        """Return whether the next plan that runs has rows to remove."""
        return bool(self.batch.carried.removed_rows)

    @property
    def has_work(self) -> bool:
        """Return whether a step can change anything. If not, only a message or a deadline can change that."""
        has_requests = len(self.batch) > 0 or self.waiting.num_ready > 0
        return has_requests and self._token_budget > 0 and self.has_executor

    def pause(self, mode: PauseMode) -> None:
        """Stop requests from starting (NEW; preempted ones still resume) or from running at all (ALL).

        Aborts and deadlines still end requests.
        """
        self.weights.reopens = False
        self.waiting.shut()
        self._token_budget = 0 if mode == PauseMode.ALL else self.max_num_batched_tokens

    def resume(self) -> None:
        """End any pause. An update of the weights that waits for requests still lets no other begin."""
        if self.weights.waits:
            self.weights.reopens = True
        else:
            self.waiting.open()
        self._token_budget = self.max_num_batched_tokens

    def reset_prefix_cache(self) -> None:
        """Forget the content of all blocks. Running requests keep their blocks, but no other request finds them."""
        self.pool.forget()

    def lose_executor(self) -> None:
        """Make all requests wait, and run nothing until restore_executor(): rows, blocks and copies are lost."""
        self.preemption.lose_all(self._requests.all())
        self.encoder_inputs.forget()
        self.has_executor = False

    def sleep(self, level: int) -> None:
        """Make all requests wait until wake_up(): the executor frees its memory."""
        self.weights.sleep(level)
        self.lose_executor()

    def wake_up(self) -> str:
        """Run requests again, and return ""; or return why that is not possible."""
        if self.weights.are_gone:
            return "the engine sleeps without weights: give it weights first, with update_weights"
        self.has_executor, self.stats.sleep_level = True, 0
        return ""

    def use_weights(self, mark: WeightsMark) -> None:
        """Make all requests start again with other weights: what was computed with the earlier ones is forgotten."""
        self.weights.apply(mark)
        if self.exchange is not None:
            self.exchange.use_weights(mark)

    def restore_executor(self) -> None:
        """Plan again: the executor is back, and has no requests."""
        self.has_executor = True

    def shutdown(self) -> None:
        """Do nothing: it holds only memory."""

    def make_stats(self) -> Statistics:
        """Return counters since the start, and gauges. call and engine_ns are 0."""
        swap_space, exchange = self.preemption.swap_space, self.exchange
        return statistics(
            self.stats,
            self.batch,
            self.waiting,
            num_swapped=self.preemption.num_swapped,
            num_swap_blocks=swap_space.num_slots,
            num_free_swap_blocks=swap_space.num_free,
            num_fetched_blocks=0 if exchange is None else exchange.num_fetched,
            num_stored_blocks=0 if exchange is None else exchange.num_stored,
            num_pins=len(self.pins),
            num_pinned_blocks=len(self.pins.blocks),
            max_pinned_blocks=self.pins.blocks.max_pages,
        )

    def take_outputs(self) -> list[ClientOutput]:
        """Return the messages that do not depend on a step's result: refusals and aborts."""
        return self.outputs.drain(self._step)

    # --- a step --------------------------------------------------------------------------------------------------

    def schedule(self, now_ns: int) -> SchedulerOutput:
        """Return the next plan, empty when nothing can run, and advance num_computed_tokens before it runs."""
        self._ends.fail_overdue(now_ns)
        if self._leads:
            self._leads.release_followers()
        draft = Draft(self._step, now_ns, self._token_budget if self.has_executor else 0)
        if self.beams:
            self.beams.mend(draft)
        self.batch.release_passed()
        self._fill(draft)
        for cut in self.cuts:
            cut(draft)
        if self.batch.forks.kept:
            self.batch.forks.drop()
        return self._commit(draft)

    def _running_first(self, draft: Draft) -> None:
        """Fill a step with chunked prefill. Running rows go first; starting prompts get the rest of the step."""
        self._running_rows.fill(draft)
        self.admission.fill(draft, self.max_num_seqs)

    def _images_first(self, draft: Draft) -> None:
        """Fill a step as _running_first() does, but give what running rows' images leave over to starting prompts."""
        self._running_rows.fill(draft)
        self.encoder_inputs.begin_step(draft)
        self.admission.fill(draft, self.max_num_seqs)

    def _prompts_first(self, draft: Draft) -> None:
        """Fill a step without chunked prefill: either start requests with whole prompts, or serve running rows."""
        self.admission.fill(draft, self.max_num_seqs)
        if draft.starts:
            draft.num_skipped += self._running_rows.num_wanting()
        else:
            self._running_rows.fill(draft)

    def update_from_output(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[ClientOutput]:
        """Append the sampled tokens, end finished requests, and return the messages for the clients.

        If a row has several tokens, those after its end are dropped together with their log probabilities.
        """
        table, counts = self.table, None
        step, rows, tenancies = self.batch.in_flight.popleft()
        assert step == plan.step == output.step, f"step {step} is due, got plan {plan.step} and output {output.step}"
        self.pool.lift_fences(step)
        live = table.tenancy[rows] == tenancies  # the others were aborted or preempted after the plan was made
        tokens = output.token_ids
        if output.pooled is not None:
            self._ends.finish_pooled(rows, live, output, output.pooled)
        if output.counts is not None:
            self.speculation.end(plan, rows, live, output.counts)
            rows, tokens, counts, finish, by_stop_token = self._take_runs(rows, tenancies, output, output.counts)
            firsts = table.num_tokens[rows] - counts
        else:
            if output.logprobs is not None:
                reported = output.logprobs.where((live & (tokens != FAILED_TOKEN))[output.logprobs.rows])
                self.outputs.add_logprobs(*table.address(rows[reported.rows]), reported)
            sampled = live & (tokens >= 0)
            if np.count_nonzero(sampled) < len(rows):
                self._ends.fail_rows(rows, live & (tokens == FAILED_TOKEN), output)
                sampled &= table.tenancy[rows] == tenancies  # a failure also removes the other choices of its request
                rows, tokens = rows[sampled], tokens[sampled]
            lengths = table.append_tokens(rows, tokens)
            finish, by_stop_token = self.batch.stop_check(rows, tokens, lengths)
            firsts = lengths - 1
        positions = firsts - table.num_prompt_tokens[rows]
        self.outputs.add_tokens(*table.address(rows), positions, tokens, finish, by_stop_token, counts)
        self.stats.num_generation_tokens += len(tokens)
        if np.count_nonzero(finish):
            self.speculation.report(rows[finish > 0], self.outputs)
            self._ends.finish(rows[finish > 0])
        if output.draft_counts is not None:
            self.update_draft_token_ids(
                plan.rows.astype(np.int64), tenancies, output.draft_counts, output.draft_token_ids
            )
        if output.candidates is not None:
            self.beams.update(plan, tenancies, output.candidates)
        return self.outputs.drain(step)

    def update_draft_token_ids(self, rows: Rows, tenancies: Ints, counts: AnyInts, token_ids: TokenIds) -> None:
        """Take counts[i] guessed next tokens of rows[i], row after row, for the row's next plan.

        Rows that now have another tenancy are ignored. A wrong guess changes no token.
        """
        self.speculation.offer(rows, tenancies, counts.astype(np.int64), token_ids)

    def _take_runs(
        self, rows: Ints, tenancies: Ints, output: ModelRunnerOutput, counts: Int32s
    ) -> tuple[Ints, TokenIds, Ints, UInt8s, Bools]:
        """Append each row's tokens up to its end, for a step in which rows have several tokens or none.

        Returns the rows with tokens, their tokens and counts, finish and by_stop_token.
        """
        table, tokens = self.table, output.token_ids
        assert len(counts) == len(rows), f"{len(counts)} counts for {len(rows)} rows"
        assert int(counts.sum()) == len(tokens), f"{len(tokens)} tokens for counts {counts}"
        is_failed = np.zeros(len(rows), np.bool_)
        is_failed[np.arange(len(rows)).repeat(counts)[tokens == FAILED_TOKEN]] = True
        self._ends.fail_rows(rows, is_failed & (table.tenancy[rows] == tenancies), output)
        live = table.tenancy[rows] == tenancies
        sampled = live & (counts > 0)
        taken, kept = rows[sampled], counts[sampled].astype(np.int64)
        kept, tokens, finish, by_stop_token = self.batch.stop_check.cut(taken, tokens[sampled.repeat(counts)], kept)
        assert not np.count_nonzero(tokens < 0), f"a negative token must be its row's only one: {tokens}"
        table.append_tokens(taken, tokens, kept)
        if output.logprobs is not None:
            owners = output.logprobs.rows
            is_known = output.logprobs.positions < table.num_tokens[rows[owners]]
            reported = output.logprobs.where(live[owners] & is_known)
            self.outputs.add_logprobs(*table.address(rows[reported.rows]), reported)
        computed = np.minimum(table.num_computed_tokens[taken], table.num_tokens[taken])
        self.batch.prefix_cache.name_full_blocks(taken, computed)  # accepted drafts filled some
        return taken, tokens, kept, finish, by_stop_token

    def _commit(self, draft: Draft) -> SchedulerOutput:
        table = self.table
        if draft.preempted:
            self.outputs.events.add_preempted(draft.preempted, draft.now_ns)
        rows, counts = draft.rows, draft.counts
        if np.count_nonzero(counts) < len(rows):
            rows, counts = rows[counts > 0], counts[counts > 0]
        self.policy.serve(rows, counts)
        if draft.starts:
            rows = np.concatenate([rows, self._launch(draft)])
            counts = np.concatenate([counts, np.array([start.num_tokens for start in draft.starts])])
        self.speculation.fill(draft, rows, counts)
        self.decision = draft.decision(rows, counts, len(self.waiting), self.pool.num_free)
        self.stats.count_decision(self.decision)
        if not len(rows) and not draft.image_parts and not draft.dropped:
            return finish_plan(draft, rows, counts, NOTHING_CARRIED)  # not run: the next plan that runs carries it
        self._step += 1
        if self.batch.carried.renewed_rows:
            draft.renew(self.batch)
        known, placeholders = table.num_tokens[rows], table.num_placeholders[rows]
        table.num_computed_tokens[rows] = ends = table.num_computed_tokens[rows] + counts
        table.num_placeholders[rows] = placeholders + (ends == known + placeholders)
        if draft.guessed is not None:
            self.speculation.begin(draft.guessed)
        self.batch.prefix_cache.name_full_blocks(rows, np.minimum(ends, known))
        self.batch.in_flight.append((draft.step, rows, table.tenancy[rows]))
        if (kept := self.batch.kept_states) is not None:
            draft.saved = kept.save(rows, counts)
            kept.saved_in[draft.saved.slots] = draft.step
        carried = self.batch.take_carried()
        if draft.starts or len(carried.removed_rows):  # otherwise the same rows have the same first blocks
            self.num_common_blocks = self.batch.num_common_blocks()
        self.preemption.end_plan()
        plan = finish_plan(draft, rows, counts, carried, self.num_common_blocks)
        self.stats.count_step(plan, self.pool)
        return plan

    def _launch(self, draft: Draft) -> Ints:
        """Give the starting requests rows, add them to the plan, the outputs and the counters, and return the rows."""
        rows = self.batch.launch(draft.starts)
        if self.preemption.states is not None:
            self.preemption.states.begin(draft.starts)
        draft.add_rows(rows)
        if self._leads:
            self._leads.start(draft.starts)
        self.outputs.add_starts(draft.starts, draft.now_ns)
        self.stats.count_starts(draft.starts)
        for start in draft.starts:
            start.request.has_started = True
        return rows

    def check_integrity(self) -> None:
        """Check all invariants. Errors: AssertionError with the numbers."""
        self.batch.check_integrity()
        counts = (len(self._requests), len(self.batch), len(self.waiting))
        assert counts[0] == counts[1] + counts[2], f"(live, running, waiting) = {counts}"
        self.preemption.check_integrity(list(self._requests.all()))
        self.encoder_inputs.check_integrity()


def create(config: ResolvedConfig, info: ModelInfo, epoch: int, *, policy: BuildPolicy = build_policy) -> Scheduler:
    """Return the built-in scheduler for a model. policy: see Scheduler."""
    scheduler = Scheduler(config, info.eos_token_ids, epoch, policy=policy)
    if info.state_bytes:
        scheduler.keep_states(config, info)
    return scheduler
