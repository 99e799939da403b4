"""RoutedRequests: the live requests of all clients of a fleet: each one's message, its outputs so far and its replica.

It is a journal (frontend/client/journal.py) whose numbers are tickets: one for each time that a request is placed at a
replica. Late rows under an earlier ticket find no request, so they are dropped.
"""

import msgspec
import numpy as np

from frontend.client.journal import Journal
from frontend.fleet.replicas import NO_REPLICA
from ipc.tables.arrays import Bools, Ints
from ipc.tables.columns import column
from ipc.wire.block_roots import root_of_message
from ipc.wire.messages import FinishReason, Outputs, Submission

_MAX_TICKET = 2**32 - 1


class RoutedRequests(Journal):
    """A row for each choice. Columns of requests are valid in the rows of first choices; `client` and `theirs` in
    all.
    """

    client: Ints = column()
    theirs: Ints = column()  # the client's number
    order: Ints = column()  # of arrival at the fleet
    replica: Ints = column(NO_REPLICA)  # where it is placed
    missing: Ints = column()  # tokens to compute there until its first token; 0 once that has arrived
    root: Ints = column()  # see ipc/wire/block_roots.py
    begun: Bools = column()  # it has run somewhere
    runs: Bools = column()  # it has begun at its present replica
    waits: Bools = column()  # it is in the fleet's queue
    parked: Bools = column()  # it waits outside the queue for its client, or for the end of a pause
    placed: Bools = column()  # it was sent to a replica under its present ticket, or an earlier one
    moved: Bools = column()  # it had begun elsewhere before its present placement
    prefilling: Bools = column()  # it is placed at a replica that computes only its first token
    prefilled: Bools = column()  # its prompt has been computed in this way

    def __init__(self) -> None:
        super().__init__()
        self.num_waiting = 0  # choices that have not begun
        self.num_waiting_tokens = 0
        self._waiting: dict[
            int, tuple[int, int]
        ] = {}  # by first row, of requests that have not begun: (choices, tokens)
        self._of_client: dict[int, dict[int, int]] = {}  # client -> its number -> row
        self._num_tickets = 0
        self._num_entered = 0

    @property
    def num_clients(self) -> int:
        """Return the number of clients with live requests."""
        return len(self._of_client)

    # --- one request --------------------------------------------------------------------------------------------

    def enter(self, client: int, message: Submission, now: float) -> int:
        """Add a client's request and return the row of its first choice. now: monotonic seconds."""
        ticket = self._next_ticket()
        row = self.add(msgspec.structs.replace(message, number=ticket), streaming=False, now=now)
        rows = row if message.params.n == 1 else self._rows_of_request(ticket)
        self.client[rows] = client
        self.theirs[rows] = message.number
        self.root[row] = root_of_message(message)
        self._num_entered += 1
        self.order[row] = self._num_entered
        self._of_client.setdefault(client, {})[message.number] = row
        num_tokens = (message.params.n * len(message.prompt_token_ids) + sum(map(len, message.delivered))) // 4
        self._waiting[row] = message.params.n, num_tokens
        self.num_waiting += message.params.n
        self.num_waiting_tokens += num_tokens
        return row

    def find(self, client: int, number: int) -> int:
        """Return the row of a client's request; -1 if it is not live."""
        return self._of_client.get(client, {}).get(number, -1)

    def rows_of_client(self, client: int) -> list[int]:
        """Return the rows of the first choices of a client's requests, in order of arrival."""
        return sorted(self._of_client.get(client, {}).values(), key=lambda row: int(self.order[row]))

    def rows_at(self, replica: int) -> list[int]:
        """Return the rows of the first choices of the requests placed at a replica, in order of arrival.

        NO_REPLICA: those that are not placed.
        """
        rows: list[int] = np.flatnonzero((self.replica == replica) & (self._number >= 0) & (self._choice == 0)).tolist()
        return sorted(rows, key=lambda row: int(self.order[row]))

    def choices(self, row: int) -> list[int]:
        """Return the rows of all choices of the request with this first row."""
        return self._rows_of_request(self.ticket(row))

    def of_row(self, row: int) -> Submission:
        """Return the request with this first row, under its present ticket."""
        request = self._requests[row]
        assert request is not None, f"row {row} is not the first of a request"
        return request

    def ticket(self, row: int) -> int:
        """Return the present ticket of a row's request."""
        return int(self._number[row])

    def first(self, row: int) -> int:
        """Return the row of the first choice of a row's request."""
        return int(self._first[row])

    def firsts(self, rows: Ints) -> list[int]:
        """Return the rows of the first choices of these rows' requests, each once."""
        return list(dict.fromkeys(self._first[rows].tolist()))

    def num_tokens(self, row: int) -> int:
        """Return the number of tokens of the prompt and of the first choice's output."""
        return len(self.of_row(row).prompt_token_ids) // 4 + int(self._num_delivered[row])

    def num_output(self, row: int) -> int:
        """Return the number of output tokens of all choices."""
        return int(self._num_delivered[self.choices(row)].sum())

    def token_ids(self, row: int) -> bytes:
        """Return the tokens of the prompt and of the first choice's output, int32."""
        prompt = self.of_row(row).prompt_token_ids
        count = int(self._num_delivered[row])
        return prompt + self._tokens.read(row, 0, count).astype("<i4").tobytes() if count else prompt

    def goes_on_at(self, row: int, position: int) -> bool:
        """Return whether a choice is unfinished and has this many output tokens."""
        return bool(self._num_delivered[row] == position and self._finish[row] == 0)

    def apply_row(self, row: int, outputs: Outputs, now: float) -> None:
        """Apply the outputs of one choice that continues there; see apply()."""
        if outputs.tokens:
            length = int(self._num_delivered[row])
            self._tokens.extend(row, length, np.frombuffer(outputs.tokens, "<i4"))
            self._num_delivered[row] = length + len(outputs.tokens) // 4
            self._last_token_time[row] = now
            if not self._first_token_time[row]:
                self._first_token_time[row] = now
        if outputs.finish and outputs.finish[0]:
            self._finish[row] = outputs.finish[0]
            self._finished_time[row] = now

    def is_over(self, row: int) -> bool:
        """Return whether all choices of a request have finished."""
        return all(self._finish[each] for each in self.choices(row))

    def renew_ticket(self, row: int) -> int:
        """Give a request its next ticket, so that rows under the present one are dropped; return it."""
        old, ticket = self.ticket(row), self._next_ticket()
        rows = self._rows_of_request(old)
        request = self.request(old)
        self._index.remove(old)
        self._index.add(ticket, row)
        self._number[rows] = ticket
        self._requests[row] = msgspec.structs.replace(request, number=ticket)
        return ticket

    def messages(self, row: int, now: float) -> list[msgspec.Struct]:
        """Return what to send to a replica for this request: the request, and an Abort for aborted choices."""
        request = self.of_row(row)
        if not self.moved[row] and not request.deadline_ms and not any(map(self._aborted.item, self.choices(row))):
            return [request]
        return [*self.resubmission(self.ticket(row), now)]

    def begin(self, row: int) -> None:
        """Note that a request runs where it is placed."""
        self.runs[row] = self.begun[row] = True
        self._end_wait(row)

    def has_expired(self, row: int, now: float) -> bool:
        """Return whether a request's deadline has passed."""
        deadline_ms = self.of_row(row).deadline_ms
        return deadline_ms > 0 and (now - float(self._arrival_time[row])) * 1000 >= deadline_ms

    def arrival(self, row: int) -> float:
        """Return when a request arrived, in monotonic seconds."""
        return float(self._arrival_time[row])

    def forget(self, row: int) -> None:
        """Remove a request."""
        client, number = int(self.client[row]), int(self.theirs[row])
        self._end_wait(row)
        theirs = self._of_client[client]
        del theirs[number]
        if not theirs:
            del self._of_client[client]
        self.remove(self.ticket(row))

    def aborted_rows(self, row: int, epoch: int) -> Outputs:
        """Return the last rows of a request that has been aborted, for its client: of its unfinished choices."""
        rows = [each for each in self.choices(row) if not self._finish[each]]
        return Outputs(
            epoch=epoch,
            step=0,
            numbers=self.theirs[rows].astype("<u4").tobytes(),
            positions=self._num_delivered[rows].astype("<u4").tobytes(),
            counts=bytes(2 * len(rows)),
            tokens=b"",
            choices=self._choice[rows].astype("<u2").tobytes(),
            finish=bytes([FinishReason.ABORT]) * len(rows),
        )

    # --- columns ------------------------------------------------------------------------------------------------

    def is_live(self, rows: Ints) -> Bools:
        """Return for each row (-1 = none) whether it belongs to an unfinished choice."""
        live: Bools = (rows >= 0) & (self._finish[rows] == 0)
        return live

    def lengths(self, rows: Ints) -> Ints:
        """Return the number of output tokens of each row."""
        lengths: Ints = self._num_delivered[rows]
        return lengths

    def owing(self, rows: Ints) -> list[int]:
        """Return the first rows of the requests among these whose first token is new."""
        firsts = self._first[rows]
        return list(dict.fromkeys(firsts[self.missing[firsts] > 0].tolist()))

    def _apply_events(self, outputs: Outputs) -> None:
        """Keep only tokens and ends: the rest is sent to the client at once."""

    def _end_wait(self, row: int) -> None:
        num_choices, num_tokens = self._waiting.pop(row, (0, 0))
        self.num_waiting -= num_choices
        self.num_waiting_tokens -= num_tokens

    def _next_ticket(self) -> int:
        self._num_tickets += 1
        assert self._num_tickets <= _MAX_TICKET, self._num_tickets
        return self._num_tickets
