"""Explainer: why requests run or wait, from the decision record of the last step and the queue.

Computed on demand only.
"""

import numpy as np

from core.batch.request import NO_ROW, Request
from core.scheduling.decisions import Examined, Verdict
from core.scheduling.interface import SchedulerInterface
from core.scheduling.scheduler import Scheduler
from ipc.wire.messages import CallFailed, ErrorCode, PauseMode
from ipc.wire.scheduling_messages import (
    EVERY_REQUEST,
    OWN_SESSION,
    Explain,
    Explanation,
    Reason,
    RequestExplanation,
    SchedulingState,
)

#: The most requests in one answer; larger limits are reduced to this.
MAX_EXPLAINED = 1000


def explain(
    scheduler: SchedulerInterface, policy: str, client: int, call: Explain, now_ns: int
) -> Explanation | CallFailed:
    """Return the answer for this client, or CallFailed for an unknown request. now_ns: the step's clock, in ns.

    A scheduler that is not made of the built-in one's parts has no decision record: then CallFailed too.
    """
    if not isinstance(scheduler, Scheduler):
        text = f"scheduler {policy!r} does not record why requests run or wait (docs/schedulers.md)"
        return CallFailed(call.call, ErrorCode.INVALID_ARGUMENT, text)
    return _Explainer(scheduler, now_ns).answer(policy, client, call)


class _Explainer:
    """Explanations at one moment between two steps."""

    def __init__(self, scheduler: Scheduler, now_ns: int) -> None:
        self._scheduler = scheduler
        self._now_ns = now_ns
        self._rows = scheduler.policy.in_order(scheduler.running).tolist()
        self._places = {row: at for at, row in enumerate(self._rows)}
        self._room = scheduler.admission.room()
        self._pause = scheduler.pause_mode
        self._positions: dict[tuple[int, int, int], int] = {}  # positions of the requests looked up so far
        decision = scheduler.decision
        self._examined: dict[tuple[int, int, int], Examined] = {}
        self._counts: dict[int, int] = {}
        if decision is not None:
            self._examined = {_key(one.request): one for one in decision.examined if one.request.ticket}
            self._counts = dict(zip(decision.rows.tolist(), decision.counts.tolist(), strict=True))
        self._holder = self._find_holder()

    def answer(self, policy: str, client: int, call: Explain) -> Explanation | CallFailed:
        """Return the explanation; INVALID_ARGUMENT for a request that is not live."""
        session = client if call.session == OWN_SESSION else call.session
        if call.number == EVERY_REQUEST:
            requests, num_left_out = self._some(max(0, min(call.limit, MAX_EXPLAINED)))
        else:
            requests, num_left_out = self._scheduler.find(session, call.number), 0
            if not requests:
                text = f"no live request {session}/{call.number}: it has ended, or never arrived"
                return CallFailed(call.call, ErrorCode.INVALID_ARGUMENT, text)
        scheduler, waiting, batch = self._scheduler, self._scheduler.waiting, self._scheduler.batch
        decision, pause = scheduler.decision, self._pause
        return Explanation(
            call=call.call,
            session=client,
            step=-1 if decision is None else decision.step,
            now_ns=0 if decision is None else decision.now_ns,
            policy=policy,
            pause=0 if pause is None else 1 + pause,
            num_running=len(batch),
            num_waiting=len(waiting),
            num_unbegun=waiting.num_unbegun,
            num_on_hold=waiting.num_held,
            num_swapped=scheduler.preemption.num_swapped,
            num_skipped=0 if decision is None else decision.num_skipped,
            budget=0 if decision is None else decision.budget,
            num_usable_blocks=scheduler.pool.num_blocks - 1,
            num_free_blocks=scheduler.pool.num_free,
            num_promised_blocks=batch.num_promised_blocks(),
            num_fenced_blocks=scheduler.pool.num_fenced,
            num_watermark_blocks=scheduler.admission.num_watermark_blocks,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            block_size=scheduler.block_size,
            requests=[self._of(request) for request in requests],
            num_left_out=num_left_out,
            num_common_prefix_blocks=scheduler.num_common_blocks,
            max_num_encoder_input_tokens=scheduler.encoder_inputs.budget,
            encoder_cache_size=scheduler.encoder_inputs.cache_size,
            num_encoder_cache_tokens=scheduler.encoder_inputs.num_cached_tokens,
            num_pinned_blocks=len(scheduler.pins.blocks),
            max_pinned_blocks=scheduler.pins.blocks.max_pages,
        )

    def _some(self, limit: int) -> tuple[list[Request], int]:
        """Return some of the first running and waiting requests, and how many requests are left out.

        If there are many of both, each kind gets half of the limit.
        """
        ready = self._scheduler.waiting.ready(limit)
        self._positions |= {_key(request): at for at, request in enumerate(ready)}
        queue = self._scheduler.waiting
        waiting = [*ready, *queue.aside(), *queue.unbegun(), *queue.held()]
        num_waiting = min(len(waiting), max(limit - limit // 2, limit - len(self._rows)))
        running = self._rows[: limit - num_waiting]
        requests = [self._scheduler.table.request[row] for row in running]
        chosen = [request for request in requests if request is not None] + waiting[:num_waiting]
        return chosen, len(self._rows) + len(self._scheduler.waiting) - len(chosen)

    def _of(self, request: Request) -> RequestExplanation:
        return self._running(request) if request.row != NO_ROW else self._waiting(request)

    # --- running ---

    def _running(self, request: Request) -> RequestExplanation:
        table, row = self._scheduler.table, request.row
        num_tokens, num_blocks = int(table.num_tokens[row]), self._scheduler.batch.num_held(row)
        count = self._counts.get(row, 0)
        reason, needed, available = (Reason.NONE, 0, 0) if count else self._why_skipped(row)
        return self._explanation(
            request,
            SchedulingState.RUNNING,
            (reason, needed, available),
            last_tokens=count,
            position=self._places[row],
            num_tokens=num_tokens,
            num_computed_tokens=int(table.num_computed_tokens[row]),
            num_blocks=num_blocks,
            num_missing_blocks=self._scheduler.batch.num_promised_blocks_of(row),
        )

    def _why_skipped(self, row: int) -> tuple[Reason, int, int]:
        table, decision = self._scheduler.table, self._scheduler.decision
        if self._pause is PauseMode.ALL:
            return Reason.PAUSED, 0, 0
        known = int(table.num_tokens[row] + table.num_placeholders[row])
        is_drafting = table.num_in_draft[row] > 0
        takes_turns = self._scheduler.takes_turns
        is_awaited = table.num_placeholders[row] and (takes_turns or known >= table.max_total_tokens[row])
        if decision is None or is_drafting or is_awaited:
            return Reason.IN_FLIGHT, 0, 0
        if self._scheduler.starts_alone and decision.num_started:
            return Reason.PROMPTS_FIRST, 0, 0
        wanted = known - int(table.num_computed_tokens[row])
        ends = table.num_computed_tokens[row] + np.array([min(wanted, self._scheduler.max_num_batched_tokens)])
        missing = int(self._scheduler.batch.lacking(np.array([row]), ends)[0])
        if missing > 0 and (decision.budget or missing > decision.num_free_blocks):
            return Reason.SKIPPED_BLOCKS, missing, decision.num_free_blocks
        request, begin = self._scheduler.table.request[row], int(table.num_computed_tokens[row])
        if decision.budget and request and (lacking := self._scheduler.encoder_inputs.missing_at(request, begin)):
            return Reason.SKIPPED_ENCODER_BUDGET, lacking, 0
        if takes_turns and decision.budget:
            return Reason.NEXT_TURN, 0, 0
        return Reason.SKIPPED_BUDGET, wanted, decision.budget

    # --- waiting ---

    def _waiting(self, request: Request) -> RequestExplanation:
        needs = self._scheduler.admission.appraise(request, self._room)
        state = SchedulingState.WAITING if request.swapped is None else SchedulingState.SWAPPED
        if self._scheduler.waiting.is_held(request.client):
            state = SchedulingState.ON_HOLD
        reason, holder = self._why_waiting(request)
        return self._explanation(
            request,
            state,
            reason,
            position=self._position(request),
            holder=holder,
            num_tokens=request.num_tokens,
            num_computed_tokens=needs.num_computed_tokens,
            num_blocks=needs.num_hits,
            num_missing_blocks=needs.num_missing_blocks,
            num_reserve_blocks=needs.num_reserve_blocks,
        )

    def _why_waiting(self, request: Request) -> tuple[tuple[Reason, int, int], Request | None]:
        """Return (reason, needed, available), and the request that this one waits behind, if any."""
        key = _key(request)
        if self._scheduler.waiting.is_held(request.client):
            return (Reason.ON_HOLD, 0, 0), None
        if request.follows:
            return (Reason.FIRST_CHOICE, 0, 0), None
        if request.awaits:
            return (Reason.FETCHING, 0, 0), None
        if not request.ticket or self._pause is PauseMode.ALL:
            return (Reason.PAUSED, 0, 0), None
        if (own := self._examined.get(key)) is not None:
            return (Reason(own.verdict), own.needed, max(0, own.available)), None
        if self._holder is None or self._position(self._holder) > self._position(request):
            return (Reason.NOT_YET, 0, 0), None
        return (Reason.BEHIND, 0, 0), self._holder

    def _position(self, request: Request) -> int:
        """Return the position among the requests that may start, or -1 if it may not start."""
        key = _key(request)
        if key not in self._positions:
            position = self._scheduler.waiting.position(request)
            self._positions[key] = -1 if position is None else position
        return self._positions[key]

    def _find_holder(self) -> Request | None:
        """Return the request behind which all requests wait that the last step did not examine.

        It is the last examined request if its verdict holds the rest. Otherwise it is the first examined request, whose
        lookahead is used up.
        """
        examined = list(self._examined.values())
        if not examined:
            return None
        last = examined[-1]
        return (last if last.verdict < Verdict.HOLDS_THE_REST else examined[0]).request

    def _explanation(
        self,
        request: Request,
        state: SchedulingState,
        reason: tuple[Reason, int, int],
        *,
        position: int,
        num_tokens: int,
        num_computed_tokens: int,
        num_blocks: int,
        num_missing_blocks: int,
        num_reserve_blocks: int = 0,
        last_tokens: int = 0,
        holder: Request | None = None,
    ) -> RequestExplanation:
        return RequestExplanation(
            session=request.client,
            number=request.number,
            choice=request.choice,
            state=state,
            reason=reason[0],
            needed=reason[1],
            available=reason[2],
            last_tokens=last_tokens,
            position=position,
            holder_session=0 if holder is None else holder.client,
            holder_number=0 if holder is None else holder.number,
            priority=request.priority,
            num_prompt_tokens=request.num_prompt_tokens,
            num_tokens=num_tokens,
            max_total_tokens=request.max_total_tokens,
            num_computed_tokens=num_computed_tokens,
            num_blocks=num_blocks,
            num_missing_blocks=num_missing_blocks,
            num_reserve_blocks=num_reserve_blocks,
            num_preemptions=request.num_preemptions,
            num_overtaken=request.num_overtaken,
            waited_ns=max(0, self._now_ns - request.arrival_ns),
        )


def _key(request: Request) -> tuple[int, int, int]:
    """Identity of a live request: (client, number, choice)."""
    return request.client, request.number, request.choice
