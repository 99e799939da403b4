"""ReplicaEvents: a fleet's reactions to its replicas' messages, ends and departures.

A client's tokens do not wait for the fleet's own records: receive() sends tokens, and settle() updates the records
later. Every other call settles first, so it finds the records as if they had been updated at once. They are in this
process's memory, which is not read in between: a fleet that dies loses both, and its clients have their own state.
"""

from collections import deque
from collections.abc import Callable
from struct import iter_unpack

from frontend.fleet.calls import Calls
from frontend.fleet.dispatch import Dispatch
from frontend.fleet.ends import Ends
from frontend.fleet.forwarding import Routed, RoutedRow, forward, forward_row, only_new
from frontend.fleet.membership import Membership
from frontend.fleet.replicas import Replica, ReplicaState
from ipc.errors import MalformedMessageError
from ipc.wire.messages import EngineStopping, ErrorCode, Outputs, Refused, RequestFailed, ServerMessage, Welcome
from ipc.wire.pin_messages import Pinned
from ipc.wire.scheduling_messages import KVEvents

RETRY_AFTER_MS = 1000
_ELSEWHERE = (
    ErrorCode.RESOURCE_EXHAUSTED,
    ErrorCode.UNAVAILABLE,
)  # another replica may take it


class ReplicaEvents:
    """The handlers of replicas' events. Times are monotonic seconds. to_clients: gets messages with their clients."""

    def __init__(
        self,
        dispatch: Dispatch,
        membership: Membership,
        calls: Calls,
        ends: Ends,
        *,
        to_clients: list[tuple[int, ServerMessage]],
    ) -> None:
        self._dispatch = dispatch
        self._requests, self._replicas = dispatch.requests, dispatch.replicas
        self._membership = membership
        self._calls = calls
        self._ends = ends
        self._to_clients = to_clients
        self._unsettled: deque[Callable[[], None]] = deque()

    def settle(self) -> None:
        """Apply what receive() has put off."""
        while self._unsettled:
            self._unsettled.popleft()()

    def receive(self, row: int, message: ServerMessage, now: float) -> None:
        """Take in a message of a replica."""
        if isinstance(message, KVEvents):
            self._unsettled.append(lambda: self._note_events(row, message, now))
            return
        self.settle()
        replica = self._replicas.by_row.get(row)
        if replica is None:
            return
        if replica.welcome is None and not isinstance(message, Welcome | Refused):
            return
        match message:
            case Outputs():
                self._receive_outputs(replica, message, now)
            case RequestFailed():
                self._receive_failure(replica, message, now)
            case Pinned():
                self._forward_pins(message)
            case Welcome():
                if replica.welcome is None:
                    self._membership.welcome(replica, message)
                    self._ends.place(now)
            case Refused() if replica.welcome is None:
                self._membership.refused(replica, message)
            case Refused():
                self.lose(row, f"it ended the session: {message.message}", now)
            case EngineStopping():
                self.lose(row, f"it stopped{': ' if message.error else ''}{message.error}", now)
            case _:
                self._calls.receive(row, message, now)

    def _forward_pins(self, message: Pinned) -> None:
        """Send the answers to a request's pins to its client, under its own number."""
        requests, row = self._requests, self._requests.row(message.number)
        if row >= 0:
            requests.note_pins(message.number, message.pins)
            own = Pinned(int(requests.theirs[row]), message.pins)
            self._to_clients.append((int(requests.client[row]), own))

    def _receive_outputs(self, replica: Replica, message: Outputs, now: float) -> None:
        assert replica.welcome is not None
        if message.epoch != replica.welcome.epoch:
            return
        requests, stages = self._requests, self._dispatch.stages
        try:
            if not self._replicas.num_prefill and (own := forward_row(requests, message, self._ends.epoch)) is not None:
                self._to_clients.append((own.client, own.message))
                self._unsettled.append(lambda: self._note_row(replica, own, now))
            else:
                routed, moving = stages.end(only_new(requests, message))
                self._to_clients += forward(requests, routed, self._ends.epoch)
                self._unsettled.append(lambda: self._note_outputs(replica, routed, moving, now))
        except MalformedMessageError as error:
            self._lose_malformed(replica, error, now)
            return
        if not self._note_begun(message):
            self.settle()

    def _note_begun(self, message: Outputs) -> bool:
        """Note which requests have begun; return False if one may end that has not.

        That is not put off: a client that gets the end must find room for its next request.
        """
        requests = self._requests
        for ticket, _ in iter_unpack("<II", message.started):
            row = requests.row(ticket)
            if row >= 0 and not requests.runs[row]:
                requests.begin(row)
        return not message.finish or requests.num_waiting == 0

    def _note_row(self, replica: Replica, own: RoutedRow, now: float) -> None:
        """Apply an output of one row that has been sent."""
        requests, outputs = self._requests, own.message
        requests.apply_row(own.row, outputs, now)
        first = requests.first(own.row)
        if outputs.tokens and requests.missing[first]:
            self._dispatch.note_tokens([first])
        self._note_ends(replica, [first] if outputs.finish else [], now)

    def _note_outputs(self, replica: Replica, routed: Routed, moving: list[int], now: float) -> None:
        """Apply outputs that have been sent. moving: the rows of requests that have ended their first stage."""
        requests, dispatch = self._requests, self._dispatch
        try:
            news = requests.apply_columns(routed.outputs, routed.columns, routed.rows, now)
        except MalformedMessageError as error:
            self._lose_malformed(replica, error, now)
            return
        dispatch.note_tokens(requests.owing(news))
        finish = routed.columns.finish
        ended = [] if finish is None else requests.firsts(routed.rows[finish > 0])
        for row in moving:
            dispatch.release(row)
            self._ends.free(row, "its first stage has ended")
        self._note_ends(replica, ended, now)

    def _note_ends(self, replica: Replica, rows: list[int], now: float) -> None:
        """Remove those of these requests that are over, and use the room that they leave. rows: of first choices."""
        for row in rows:
            if self._requests.is_over(row):
                self._dispatch.forget(row)
        if replica.is_leaving:
            self.finish_leaving(replica, now)
        if self._dispatch.has_queue:
            self._ends.place(now)

    def _lose_malformed(self, replica: Replica, error: MalformedMessageError, now: float) -> None:
        self.lose(replica.row, f"it sent an invalid output: {error}", now)

    def _receive_failure(self, replica: Replica, message: RequestFailed, now: float) -> None:
        row = self._requests.row(message.number)
        if row < 0:
            return
        if message.code in _ELSEWHERE and not self._requests.is_aborted(message.number):
            self._dispatch.release(row)
            if replica.state is ReplicaState.OPEN:
                is_full = message.code == ErrorCode.RESOURCE_EXHAUSTED
                replica.state = ReplicaState.FULL if is_full else ReplicaState.DRAINING
                replica.full_until = now + (message.retry_after_ms or RETRY_AFTER_MS) / 1000
                self._membership.close(replica)
            self._dispatch.put(row)
            self._ends.place(now)
        else:
            self._ends.fail(row, message.code, message.message)
        if replica.is_leaving:
            self.finish_leaving(replica, now)

    def _note_events(self, row: int, message: KVEvents, now: float) -> None:
        replica = self._replicas.by_row.get(row)
        if replica is None or replica.welcome is None:
            return
        try:
            self._dispatch.index.apply(replica.row, message.events)
        except ValueError as error:
            self.lose(replica.row, f"it sent invalid KV events: {error}", now)
        else:
            replica.has_picture = True

    def lose(self, row: int, reason: str, now: float, *, is_death: bool = False) -> None:
        """Note the end of a replica's connection or session; its requests continue elsewhere.

        is_death: one of its requests may have killed it.
        """
        self.settle()
        replica = self._replicas.by_row[row]
        if replica.welcome is None:
            self._membership.retry_later(replica, reason)
            return
        rows = self._dispatch.lose(replica)
        culprit = None
        if is_death:
            # A request that was not seen to begin may also have run, unless the others took all rows.
            running = [each for each in rows if self._requests.runs[each]]
            has_room = len(running) < replica.welcome.limits.max_num_seqs
            suspects = rows if has_room else running
            culprit = self._dispatch.suspects.note_death(replica.address, suspects, self._requests)
        self._membership.end_session(replica, reason)
        if culprit is not None:
            names = " and ".join(culprit[1])
            self._ends.fail(culprit[0], ErrorCode.INTERNAL, f"the replicas {names} died while they ran this request")
        for each in rows:
            if culprit is None or each != culprit[0]:
                self._ends.free(each, f"the replica {replica.address} was lost ({reason})")
        if replica.is_leaving:
            self._membership.remove(replica)
        self._ends.place(now)

    def drain(self, replica: Replica, now: float, *, move_after_s: float | None = None) -> None:
        """Let a replica leave the fleet: waiting requests move at once; running ones end there, or move after this
        time.
        """
        replica.is_leaving = True
        replica.move_at = None if move_after_s is None else now + move_after_s
        self._membership.close(replica)
        if replica.welcome is not None:
            replica.state = ReplicaState.LEAVING
        self._ends.move([row for row in self._requests.rows_at(replica.row) if not self._requests.runs[row]])
        self.finish_leaving(replica, now)
        self._ends.place(now)

    def finish_leaving(self, replica: Replica, now: float) -> None:
        """Move the running requests of a leaving replica, if it is time, and remove it once it has none left."""
        if replica.move_at is not None and now >= replica.move_at:
            self._ends.move([row for row in self._requests.rows_at(replica.row) if self._ends.may_move(row)])
            replica.move_at = None
        if not self._replicas.live[replica.row]:
            self._membership.remove(replica)
