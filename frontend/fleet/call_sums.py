"""Answers of all replicas as one: counters and gauges are summed; maxima are the largest."""

from typing import Any

import msgspec

from frontend.fleet.dispatch import Dispatch
from frontend.fleet.replicas import NO_REPLICA
from frontend.fleet.requests import RoutedRequests
from ipc.params.sampling_params import SamplingParams
from ipc.wire.lora_messages import LoraAdapters
from ipc.wire.messages import ServerMessage, Statistics
from ipc.wire.metrics_messages import Histogram, Metrics
from ipc.wire.scheduling_messages import Explain, Explanation, Reason, RequestExplanation, SchedulingState

#: Fields of Statistics that are not sums: the largest of all replicas, or the first one's.
_LARGEST = ("max_scheduled_rows", "weights_version", "sleep_level")
_FIRST = ("block_size",)
_PAUSED_NEW, _PAUSED_ALL = 1, 2


def sum_statistics(call: int, answers: list[ServerMessage], dispatch: Dispatch, now: float) -> Statistics:
    """Return the statistics of all replicas together. Requests in the fleet's queue count as waiting."""
    each = [msgspec.structs.asdict(one) for one in answers if isinstance(one, Statistics)]
    total: dict[str, Any] = {}
    for name, first in each[0].items():
        values = [one[name] for one in each]
        if isinstance(first, list):
            total[name] = _sum_lists(values)
        else:
            total[name] = max(values) if name in _LARGEST else first if name in _FIRST else sum(values)
    total |= {"call": call, "engine_ns": int(now * 1e9)}
    total["num_waiting"] += dispatch.num_queued
    return Statistics(**total)


def sum_metrics(call: int, answers: list[ServerMessage], dispatch: Dispatch, now: float) -> Metrics:
    """Return the measurements of requests at all replicas, from all clients."""
    total = Metrics(call, False)
    for one in answers:
        if isinstance(one, Metrics):
            total = Metrics(
                call,
                total.is_measuring or one.is_measuring,
                {**total.histograms, **{n: _add(total.histograms.get(n), h) for n, h in one.histograms.items()}},
                _sum_counts(total.num_finished, one.num_finished),
                _sum_counts(total.num_refused, one.num_refused),
                total.num_sessions + one.num_sessions,
            )
    return total


def common_adapters(call: int, answers: list[ServerMessage], dispatch: Dispatch, now: float) -> LoraAdapters:
    """Return the adapters that all replicas have under the same name, because any of them may get the request."""
    each = [one for one in answers if isinstance(one, LoraAdapters)]
    named = [{adapter.name: adapter for adapter in one.adapters} for one in each]
    shared = [
        adapter
        for name, adapter in named[0].items()
        if all(name in one and one[name].digest == adapter.digest for one in named)
    ]
    return LoraAdapters(call, shared, all(one.is_enabled for one in each))


def join_explanations(
    dispatch: Dispatch, client: int, call: Explain, answers: list[tuple[int, ServerMessage]], now: float
) -> Explanation:
    """Return one explanation of this fleet's requests, under its clients' names.

    Requests that others have sent to the replicas are counted, but not listed. now: monotonic seconds.
    """
    requests, entries, num_left_out = dispatch.requests, list[RequestExplanation](), 0
    parts = [one for _, one in answers if isinstance(one, Explanation)]
    for part in parts:
        num_left_out += part.num_left_out
        for one in part.requests:
            row = requests.row(one.number) if one.session == part.session else -1
            if row < 0:
                num_left_out += 1
                continue
            holder = requests.row(one.holder_number) if one.holder_session == part.session else -1
            held = (int(requests.client[holder]), int(requests.theirs[holder])) if holder >= 0 else (0, 0)
            session, number = int(requests.client[row]), int(requests.theirs[row])
            change = {"session": session, "number": number, "holder_session": held[0], "holder_number": held[1]}
            entries.append(msgspec.structs.replace(one, **change))
    if call.number < 0:
        kept = requests.rows_at(NO_REPLICA)
        entries += [queued_explanation(requests, row, now) for row in kept]
        num_left_out += max(0, len(entries) - max(0, call.limit))
        entries = entries[: max(0, call.limit)]
    whole = own_explanation(dispatch, client, call.call, entries, now)
    if not parts:
        return whole
    sums = {name: sum(getattr(part, name) for part in parts) for name in _SUMMED}
    sums["num_waiting"] += whole.num_waiting
    firsts = {name: getattr(parts[0], name) for name in ("step", "policy", "block_size")}
    return msgspec.structs.replace(whole, **sums, **firsts, num_left_out=num_left_out)


_SUMMED = (
    "num_running",
    "num_waiting",
    "num_unbegun",
    "num_on_hold",
    "num_swapped",
    "num_skipped",
    "budget",
    "num_usable_blocks",
    "num_free_blocks",
    "num_promised_blocks",
    "num_fenced_blocks",
    "num_watermark_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_encoder_input_tokens",
    "encoder_cache_size",
    "num_encoder_cache_tokens",
    "num_pinned_blocks",
    "max_pinned_blocks",
)


def own_explanation(
    dispatch: Dispatch, client: int, call: int, entries: list[RequestExplanation], now: float
) -> Explanation:
    """Return an explanation of the requests in the fleet's own queue."""
    pause = _PAUSED_ALL if dispatch.pauses_all else _PAUSED_NEW if dispatch.pauses_new else 0
    numbers = dict.fromkeys(_SUMMED, 0) | {"num_waiting": dispatch.num_queued}
    return Explanation(
        call=call,
        session=client,
        step=0,
        now_ns=int(now * 1e9),
        policy="fleet",
        pause=pause,
        block_size=0,
        requests=entries,
        num_left_out=0,
        **numbers,
    )


def queued_explanation(requests: RoutedRequests, row: int, now: float) -> RequestExplanation:
    """Return why a request waits in the fleet's own queue."""
    request = requests.request(requests.ticket(row))
    num_prompt, params = len(request.prompt_token_ids) // 4, request.params
    most = (params.max_tokens or 0) if isinstance(params, SamplingParams) else 0
    known: dict[str, Any] = dict.fromkeys(RequestExplanation.__struct_fields__, 0) | {
        "session": int(requests.client[row]),
        "number": int(requests.theirs[row]),
        "state": SchedulingState.WAITING,
        "reason": Reason.PAUSED if requests.parked[row] else Reason.NO_REPLICA,
        "position": -1,
        "priority": request.priority,
        "num_prompt_tokens": num_prompt,
        "num_tokens": requests.num_tokens(row),
        "max_total_tokens": num_prompt + most,
        "waited_ns": int((now - requests.arrival(row)) * 1e9),
    }
    return RequestExplanation(**known)


def _add(one: Histogram | None, other: Histogram) -> Histogram:
    if one is None or one.bounds != other.bounds:
        return other
    return Histogram(one.bounds, _sum_lists([one.counts, other.counts]), one.total + other.total)


def _sum_lists(lists: list[list[int]]) -> list[int]:
    length = max(map(len, lists))
    return [sum(one[at] for one in lists if at < len(one)) for at in range(length)]


def _sum_counts(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}
