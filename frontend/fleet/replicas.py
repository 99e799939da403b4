"""Replicas: the engines of a fleet as a table, with what the fleet itself has sent to each; and their states."""

from enum import Enum

import msgspec

from ipc.tables.arrays import Bools, Ints
from ipc.tables.columns import Columns, column
from ipc.wire.messages import Welcome

_FIRST_ROWS = 8
NO_REPLICA = -1


class ReplicaState(Enum):
    """The states of a replica, as shown by `engine-core control replicas`."""

    CONNECTING = "no answer yet"
    OPEN = "open"
    FULL = "open, but takes no more requests now"
    DRAINING = "finishes its running requests: its owner drains it"
    LEAVING = "finishes its running requests, then leaves the fleet"
    LOST = "lost; connecting again"
    REFUSED = "refused"


class Replica(msgspec.Struct, eq=False):
    """One engine of the fleet. row: in the table; it is also its number in the prefix index."""

    row: int
    address: str
    state: ReplicaState = ReplicaState.CONNECTING
    reason: str = ""  # of LOST and REFUSED
    welcome: Welcome | None = None  # of the present session; None: there is none
    session_token: bytes = b""  # of the last session
    is_leaving: bool = False
    move_at: float | None = None  # when its running requests move; monotonic seconds, None = never
    full_until: float = 0.0  # when it last refused a request for lack of room; monotonic seconds
    has_picture: bool = False  # its snapshot of the prefix cache has begun to arrive
    num_lost: int = 0  # sessions
    send_at: float = 0.0  # when a heartbeat is due; monotonic seconds
    heartbeat_s: float = 0.0  # 0 = none is needed
    heard_at: float = 0.0  # when it last said something; monotonic seconds
    asked_at: float | None = None  # when it was asked for a sign of life, and has not answered; monotonic seconds


class Replicas(Columns):
    """The table, whose columns placement reads; a row is reused after its replica has left."""

    queued: Ints = column()  # tokens to compute of requests placed there whose first token has not arrived
    live: Ints = column()  # requests placed there
    given: Ints = column()  # tokens to compute of all requests ever placed there
    is_open: Bools = column()  # takes requests
    prefills: Bools = column()  # computes prompts for the others; see frontend/fleet/dispatch.py

    def __init__(self) -> None:
        super().__init__(_FIRST_ROWS)
        self.by_row: dict[int, Replica] = {}
        self.num_prefill = 0  # replicas that compute prompts for the others

    def add(self, address: str, *, prefills: bool = False) -> Replica:
        """Add a replica that is not connected yet."""
        row = next(row for row in range(len(self.by_row) + 1) if row not in self.by_row)
        if row >= self.num_column_rows:
            self.grow_columns(2 * self.num_column_rows)
        self.clear_columns(slice(row, row + 1))
        replica = self.by_row[row] = Replica(row, address)
        self.set_role(replica, prefills=prefills)
        return replica

    def set_role(self, replica: Replica, *, prefills: bool) -> None:
        """Let a replica compute prompts for the others from now on, or run requests to their end like the others."""
        self.num_prefill += prefills - bool(self.prefills[replica.row])
        self.prefills[replica.row] = prefills

    def remove(self, replica: Replica) -> None:
        """Remove a replica."""
        self.num_prefill -= bool(self.prefills[replica.row])
        del self.by_row[replica.row]
        self.clear_columns(slice(replica.row, replica.row + 1))

    def find(self, address: str) -> Replica | None:
        """Return the replica with this address."""
        return next((one for one in self.by_row.values() if one.address == address), None)

    @property
    def sessions(self) -> list[Replica]:
        """Return the replicas with an open session."""
        return [one for one in self.by_row.values() if one.welcome is not None]
