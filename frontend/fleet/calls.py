"""Calls: clients' calls to a fleet, answered by it, by one of its replicas, or by all of them together."""

import itertools
from collections.abc import Callable
from typing import Protocol

import msgspec

from frontend.fleet.call_sums import (
    common_adapters,
    join_explanations,
    own_explanation,
    queued_explanation,
    sum_metrics,
    sum_statistics,
)
from frontend.fleet.dispatch import Dispatch
from frontend.fleet.membership import Membership, Order, Send
from frontend.fleet.replicas import NO_REPLICA, Replica
from frontend.fleet.requests import RoutedRequests
from ipc.errors import AddressError
from ipc.wire.call import Call
from ipc.wire.fleet_messages import ChangeReplica, GetReplicas, ReplicaChange, ReplicaList, ReplicaStatus
from ipc.wire.lora_messages import ListLora
from ipc.wire.messages import (
    CallDone,
    CallFailed,
    ErrorCode,
    GetModelInformation,
    GetStatistics,
    GetTokenizer,
    Pause,
    PauseMode,
    ResetPrefixCache,
    Resume,
    ServerMessage,
    encode,
)
from ipc.wire.metrics_messages import GetMetrics
from ipc.wire.scheduling_messages import EVERY_REQUEST, OWN_SESSION, Explain, FollowKVEvents, StopRequest
from ipc.wire.sockets import check_address


class Host(Protocol):
    """The fleet."""

    dispatch: Dispatch
    membership: Membership
    requests: RoutedRequests
    orders: list[Order]
    to_clients: list[tuple[int, ServerMessage]]

    def pause(self, *, all_requests: bool) -> None:
        """Let no request begin, or let none run."""

    def resume(self, now: float) -> None:
        """End a pause."""

    def abort_rows(self, rows: list[int]) -> None:
        """Abort whole requests."""

    def drain(self, replica: Replica, now: float, *, move_after_s: float | None = None) -> None:
        """Let a replica leave the fleet."""


class _Pending(msgspec.Struct, eq=False):
    """A call that was sent to replicas."""

    client: int
    call: Call
    missing: set[int]  # rows of replicas that have not answered
    answers: list[tuple[int, ServerMessage]] = msgspec.field(default_factory=list)  # (row, answer)
    asked_at: float = 0.0


class Calls:
    """The calls of a fleet's clients, and those of its own."""

    def __init__(self, fleet: Host) -> None:
        self._fleet = fleet
        self._pending: dict[int, _Pending] = {}
        self._numbers = itertools.count(1)

    def __bool__(self) -> bool:
        return bool(self._pending)

    def ask(self, client: int, call: Call, now: float) -> None:
        """Take a call in and answer it now or later."""
        fleet = self._fleet
        match call:
            case Pause(mode=mode):
                fleet.pause(all_requests=mode is PauseMode.ALL)
                self._answer(client, CallDone(call.call))
            case Resume():
                fleet.resume(now)
                self._answer(client, CallDone(call.call))
            case StopRequest(session=session, number=number):
                row = fleet.requests.find(session, number)
                fleet.abort_rows([row] if row >= 0 else [])
                self._answer(client, CallDone(call.call))
            case GetReplicas():
                self._answer(client, self._list(call.call))
            case ChangeReplica():
                self._answer(client, self._change(call, now))
            case Explain():
                self._explain(client, call, now)
            case GetStatistics() | ResetPrefixCache() | GetMetrics() | ListLora():
                self._relay(client, call, [one.row for one in fleet.dispatch.replicas.sessions], now)
            case GetTokenizer() | GetModelInformation():
                self._relay(client, call, [one.row for one in fleet.dispatch.replicas.sessions][:1], now)
            case _:
                about = (
                    "a fleet has several caches: follow each replica's"
                    if isinstance(call, FollowKVEvents)
                    else "a fleet does not support this call"
                )
                self._answer(client, CallFailed(call.call, ErrorCode.INVALID_ARGUMENT, about))

    def receive(self, row: int, message: ServerMessage, now: float) -> None:
        """Take in a replica's answer."""
        number: int = getattr(message, "call", -1)
        pending = self._pending.get(number)
        if pending is not None and row in pending.missing:
            pending.missing.discard(row)
            pending.answers.append((row, message))
            self._finish_if_complete(number, now)

    def lose(self, row: int) -> None:
        """Stop waiting for answers of a replica whose session has ended."""
        for number, pending in list(self._pending.items()):
            if row in pending.missing:
                pending.missing.discard(row)
                self._finish_if_complete(number, pending.asked_at)

    def forget(self, client: int) -> None:
        """Drop the calls of a client that has left."""
        self._pending = {number: one for number, one in self._pending.items() if one.client != client}

    def _relay(self, client: int, call: Call, rows: list[int], now: float) -> None:
        number = next(self._numbers)
        self._pending[number] = _Pending(client, call, set(rows), asked_at=now)
        frame = encode(msgspec.structs.replace(call, call=number))
        self._fleet.orders.extend(Send(row, frame) for row in rows)
        self._finish_if_complete(number, now)

    def _finish_if_complete(self, number: int, now: float) -> None:
        pending = self._pending[number]
        if pending.missing:
            return
        del self._pending[number]
        self._answer(pending.client, self._joined(pending, now))

    def _joined(self, pending: _Pending, now: float) -> ServerMessage:
        call, answers = pending.call.call, [answer for _, answer in pending.answers]
        failed = next((one for one in answers if isinstance(one, CallFailed)), None)
        if failed is not None:
            return msgspec.structs.replace(failed, call=call)
        if isinstance(pending.call, Explain):
            explanations = [(row, one) for row, one in pending.answers]
            return join_explanations(self._fleet.dispatch, pending.client, pending.call, explanations, now)
        if not answers:
            return CallFailed(call, ErrorCode.UNAVAILABLE, "no replica of the fleet has answered")
        join = _JOINS.get(type(pending.call))
        if join is None:
            return msgspec.structs.replace(answers[0], call=call)
        return join(call, answers, self._fleet.dispatch, now)

    def _explain(self, client: int, call: Explain, now: float) -> None:
        requests = self._fleet.requests
        session = client if call.session == OWN_SESSION else call.session
        if call.number == EVERY_REQUEST:
            asked = msgspec.structs.replace(call, session=OWN_SESSION)
            self._relay(client, asked, [one.row for one in self._fleet.dispatch.replicas.sessions], now)
            return
        row = requests.find(session, call.number)
        if row < 0:
            text = f"there is no live request {session}/{call.number}: it has ended, or never arrived"
            self._answer(client, CallFailed(call.call, ErrorCode.INVALID_ARGUMENT, text))
            return
        at = int(requests.replica[row])
        if at == NO_REPLICA:
            entries = [queued_explanation(requests, row, now)]
            self._answer(client, own_explanation(self._fleet.dispatch, client, call.call, entries, now))
            return
        number = next(self._numbers)
        self._pending[number] = _Pending(client, call, {at}, asked_at=now)
        self._fleet.orders.append(Send(at, encode(Explain(number, requests.ticket(row), OWN_SESSION, call.limit))))

    def _list(self, call: int) -> ReplicaList:
        dispatch, statuses = self._fleet.dispatch, []
        for row, one in sorted(dispatch.replicas.by_row.items()):
            statuses.append(
                ReplicaStatus(
                    address=one.address,
                    state=one.state.name.lower(),
                    reason=one.reason,
                    engine_id="" if one.welcome is None else one.welcome.engine_id,
                    num_live=int(dispatch.replicas.live[row]),
                    num_queued_tokens=int(dispatch.replicas.queued[row]),
                    num_cached_blocks=dispatch.index.num_blocks(row),
                    num_lost=one.num_lost,
                )
            )
        return ReplicaList(call, statuses, dispatch.num_queued, dispatch.num_moved)

    def _change(self, call: ChangeReplica, now: float) -> CallDone | CallFailed:
        fleet = self._fleet
        if call.change != ReplicaChange.LEAVE:
            try:
                check_address(call.address, binding=False)
            except AddressError as error:
                return CallFailed(call.call, ErrorCode.INVALID_ARGUMENT, str(error))
            fleet.membership.join(call.address, prefills=call.change == ReplicaChange.JOIN_PREFILL)
            return CallDone(call.call)
        replica = fleet.dispatch.replicas.find(call.address)
        if replica is None:
            known = ", ".join(one.address for one in fleet.dispatch.replicas.by_row.values()) or "none"
            text = f"{call.address!r} is not a replica of this fleet; its replicas are: {known}"
            return CallFailed(call.call, ErrorCode.INVALID_ARGUMENT, text)
        fleet.drain(replica, now, move_after_s=None if call.move_after_ms < 0 else call.move_after_ms / 1000)
        return CallDone(call.call)

    def _answer(self, client: int, message: ServerMessage) -> None:
        self._fleet.to_clients.append((client, message))


#: How answers of all replicas become one; the default is the first answer.
_JOINS: dict[type[Call], Callable[[int, list[ServerMessage], Dispatch, float], ServerMessage]] = {
    GetStatistics: sum_statistics,
    GetMetrics: sum_metrics,
    ListLora: common_adapters,
}
