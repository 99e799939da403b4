"""Fleet: many engines as one: it places clients' requests at replicas, and continues them elsewhere if a replica is
lost.

It is pure: no socket, no clock, no randomness. The same calls in the same order give the same messages and orders. It
runs in a client's own process (frontend/fleet/transport.py), in a router (tools/commands/route/), and in the tests'
simulation.

The effects of a replica's message are applied by the next call of any kind (frontend/fleet/replica_events.py), so the
owner can send the messages for clients first.
"""

from collections.abc import Iterable

import numpy as np

from frontend.fleet.calls import Calls
from frontend.fleet.dispatch import Dispatch
from frontend.fleet.ends import Ends
from frontend.fleet.membership import SILENCE_S, Membership, Order, Send
from frontend.fleet.replica_events import RETRY_AFTER_MS, ReplicaEvents
from frontend.fleet.replicas import NO_REPLICA, Replica
from ipc.tables.columns import unpack_choices, unpack_numbers
from ipc.wire.call import Call
from ipc.wire.messages import (
    Abort,
    ErrorCode,
    RequestFailed,
    ServerMessage,
    Submission,
    encode,
)

_TICK_S = 0.02  # between checks of deadlines and suspects
#: Prompts with fewer tokens to compute are computed at the replica of their output: going through another one costs
#: more.
PREFILL_MIN_TOKENS = 256


class Fleet:
    """The core of a fleet. Times are monotonic seconds, and never go back.

    policy: prefix, least_loaded or round_robin. seed: decides between otherwise equal replicas. name: the fleet's name
    as a client of its replicas. max_queued: most requests that wait because no replica takes them. patience_s: how long
    they wait if there is no replica. prefill_min_tokens: see Stages. to_clients, orders: messages and orders for the
    fleet's owner.
    """

    def __init__(
        self,
        *,
        policy: str = "prefix",
        seed: int = 0,
        name: str = "fleet",
        max_queued: int = 1 << 20,
        patience_s: float = 60.0,
        epoch: int = 0,
        prefill_min_tokens: int = PREFILL_MIN_TOKENS,
    ) -> None:
        self.to_clients: list[tuple[int, ServerMessage]] = []
        self.orders: list[Order] = []
        self.dispatch = Dispatch(
            policy, seed, lambda row, frame: self.orders.append(Send(row, frame)), prefill_min_tokens
        )
        self.requests, self.replicas = self.dispatch.requests, self.dispatch.replicas
        self.membership = Membership(self.dispatch, name, self.orders)
        self.calls = Calls(self)
        self.membership.on_session_end = self.calls.lose
        self._ends = Ends(self.dispatch, self.membership, self.to_clients, epoch)
        self._events = ReplicaEvents(self.dispatch, self.membership, self.calls, self._ends, to_clients=self.to_clients)
        self._max_queued = max_queued
        self._patience_s = patience_s
        self._alone_since: float | None = None  # since when there is no replica that takes requests
        self._next_tick = 0.0
        self._due = 0.0

    @property
    def has_unfinished(self) -> bool:
        """Return whether any request or call is unfinished."""
        return self.requests.num_live > 0 or bool(self.calls)

    def settle(self) -> None:
        """Apply what was put off until the messages for clients had been sent."""
        self._events.settle()

    def take_messages(self) -> list[tuple[int, ServerMessage]]:
        """Return the messages for clients since the last call, each with its client."""
        messages = self.to_clients.copy()
        self.to_clients.clear()
        return messages

    # --- clients ------------------------------------------------------------------------------------------------

    def submit(self, client: int, message: Submission, now: float) -> None:
        """Take a request in. Its number must not be in use by its client."""
        self.settle()
        if self.dispatch.num_queued >= self._max_queued:
            text = f"no replica takes more requests, and {self._max_queued} already wait; send it again later"
            failed = RequestFailed(message.number, ErrorCode.RESOURCE_EXHAUSTED, text, RETRY_AFTER_MS)
            self.to_clients.append((client, failed))
            return
        self.dispatch.put(self.requests.enter(client, message, now))
        self._ends.place(now)

    def abort(self, client: int, message: Abort) -> None:
        """Abort requests or single choices of them; unknown numbers are ignored."""
        self.settle()
        choices = unpack_choices(message.choices) if message.choices else None
        whole: list[int] = []
        for at, number in enumerate(unpack_numbers(message.numbers)):
            row = self.requests.find(client, number)
            if row < 0 or (choices is not None and at >= len(choices)):
                continue
            if choices is None:
                whole.append(row)
            elif choices[at] < len(self.requests.choices(row)):
                self._abort_choice(row, choices[at])
        self.abort_rows(whole)

    def abort_rows(self, rows: list[int]) -> None:
        """Abort whole requests, whose clients get their last rows."""
        self.settle()
        tickets = [self.requests.ticket(row) for row in rows]
        self.requests.mark_aborted(tickets, ())
        self.dispatch.abort_at_replicas(rows)
        for row in rows:
            if self.requests.replica[row] == NO_REPLICA:
                self._ends.end_aborted(row)

    def _abort_choice(self, row: int, choice: int) -> None:
        ticket, at = self.requests.ticket(row), int(self.requests.replica[row])
        self.requests.mark_aborted([ticket], [choice])
        if at != NO_REPLICA:
            numbers, which = np.array([ticket], "<u4").tobytes(), np.array([choice], "<u2").tobytes()
            self.orders.append(Send(at, encode(Abort(numbers, which))))
        elif self.requests.is_aborted(ticket):
            self._ends.end_aborted(row)

    def leave(self, client: int) -> None:
        """End a client's session: its requests are aborted, and nothing more is sent to it."""
        self.settle()
        rows = self.requests.rows_of_client(client)
        self.dispatch.abort_at_replicas(rows)
        for row in rows:
            self.dispatch.forget(row)
        self.dispatch.held.discard(client)
        self.calls.forget(client)

    def hold(self, client: int) -> None:
        """Stop a client's requests from running, because too much waits to be sent to it. If they could not continue
        exactly, those with tokens keep running.
        """
        self.settle()
        self.dispatch.held.add(client)
        self._park(self.requests.rows_of_client(client))

    def release(self, client: int, now: float) -> None:
        """Let a client's requests continue."""
        self.settle()
        self.dispatch.held.discard(client)
        self._unpark(self.requests.rows_of_client(client), now)

    def pause(self, *, all_requests: bool) -> None:
        """Let no request begin, or let none run, until resume()."""
        self.settle()
        self.dispatch.pauses_new, self.dispatch.pauses_all = True, all_requests
        rows = self._all_rows()
        self._park([row for row in rows if all_requests or not self.requests.begun[row]])

    def resume(self, now: float) -> None:
        """End a pause; do nothing if there is none."""
        self.settle()
        self.dispatch.pauses_new = self.dispatch.pauses_all = False
        self._unpark(self._all_rows(), now)

    def call(self, client: int, message: Call, now: float) -> None:
        """Answer a call, now or when the replicas have."""
        self.settle()
        self.calls.ask(client, message, now)

    def _all_rows(self) -> list[int]:
        return self.requests.firsts(self.requests.rows_of(self.requests.unfinished()))

    def _park(self, rows: Iterable[int]) -> None:
        movable = [row for row in rows if self._ends.may_move(row)]
        self.dispatch.withdraw(movable)
        self.requests.waits[movable] = False
        self.requests.parked[movable] = True

    def _unpark(self, rows: Iterable[int], now: float) -> None:
        for row in rows:
            if self.requests.parked[row]:
                self.dispatch.put(row)
        self._ends.place(now)

    # --- replicas -----------------------------------------------------------------------------------------------

    def receive(self, row: int, message: ServerMessage, now: float) -> None:
        """Take in a message of a replica."""
        self._due = 0.0
        if (replica := self.replicas.by_row.get(row)) is not None:
            self.membership.hear(replica, now)
        self._events.receive(row, message, now)

    def lose(self, row: int, reason: str, now: float, *, is_death: bool = False) -> None:
        """Note the end of a replica's connection; its requests continue elsewhere.

        is_death: see ReplicaEvents.lose().
        """
        self._due = 0.0
        self._events.lose(row, reason, now, is_death=is_death)

    def drain(self, replica: Replica, now: float, *, move_after_s: float | None = None) -> None:
        """Let a replica leave the fleet; see ReplicaEvents.drain()."""
        self._due = 0.0
        self.settle()
        self._events.drain(replica, now, move_after_s=move_after_s)

    # --- time ---------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> float:
        """Do what is due; return the latest time for the next call."""
        self.settle()
        if now < self._next_tick:
            return self._due
        self._next_tick = now + _TICK_S
        if now >= self._due:
            self._due = self.membership.tick(now)
            for replica in list(self.replicas.by_row.values()):
                if self.membership.is_silent(replica, now):
                    self.lose(replica.row, f"it has said nothing for {2 * SILENCE_S:g} s", now)
                elif replica.is_leaving and replica.welcome is not None:
                    self._events.finish_leaving(replica, now)
        if len(self.dispatch.suspects):
            self.dispatch.suspects.note_progress(self.requests)
        if (self.requests.waits | self.requests.parked).any():
            self._expire(now)
            self._ends.place(now)
        return self._due

    def _expire(self, now: float) -> None:
        """Fail queued requests whose deadline has passed, and all of them if there was no replica for too long."""
        is_alone = not self.replicas.sessions
        self._alone_since = (self._alone_since or now) if is_alone else None
        gave_up = self._alone_since is not None and now - self._alone_since > self._patience_s
        for row in np.flatnonzero(self.requests.waits | self.requests.parked).tolist():
            if self.requests.has_expired(row, now):
                self._ends.fail(
                    row, ErrorCode.DEADLINE_EXCEEDED, "the request's deadline has passed in the fleet's queue"
                )
            elif gave_up and self.requests.waits[row]:
                text = f"no replica of the fleet has answered for {self._patience_s:g} s"
                self._ends.fail(row, ErrorCode.UNAVAILABLE, text, RETRY_AFTER_MS)
