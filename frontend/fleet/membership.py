"""Membership: the fleet's sessions with its replicas: which replicas join, are refused (and why), are lost, or leave.

The first replica that answers defines what the fleet serves. Another one is accepted only if its tokens are certainly
the same.
"""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from frontend.fleet.dispatch import Dispatch
from frontend.fleet.replicas import Replica, ReplicaState
from ipc.wire.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    ErrorCode,
    GetStatistics,
    Heartbeat,
    Hello,
    Refused,
    Welcome,
    encode,
)
from ipc.wire.scheduling_messages import FollowKVEvents

EXACT = "L2"  # the level at which equal fingerprints mean equal tokens
_RETRY_S = 1.0  # from a refusal, in either direction, to the next Hello
#: A replica that has requests and says nothing for so long is asked for a sign of life; it has as long to give one.
SILENCE_S = 30.0
_HEARTBEAT = encode(Heartbeat())
_FOLLOW_CALL = 0  # number of calls whose answers are not waited for
_ASK = encode(GetStatistics(_FOLLOW_CALL))  # answered between two steps


class Open(NamedTuple):
    """Connect to a replica (again, if there was a connection) and send it this Hello."""

    row: int
    address: str
    hello: bytes


class Send(NamedTuple):
    """Send a frame to a replica."""

    row: int
    frame: bytes


class Close(NamedTuple):
    """End the connection to a replica."""

    row: int


Order = Open | Send | Close


class Membership:
    """The replicas of a fleet. orders: actions on their connections, for the owner of the sockets.

    on_freed: called with (row, reason) for each unfinished request of a lost replica, or that moves.
    """

    def __init__(self, dispatch: Dispatch, name: str, orders: list[Order]) -> None:
        self.model: Welcome | None = None  # of the first replica that answered
        self._dispatch = dispatch
        self._replicas = dispatch.replicas
        self._name = name
        self._orders = orders
        self._retry_at: dict[int, float] = {}  # by row: when to say Hello again
        self.on_session_end: Callable[[int], None] = lambda row: None

    def join(self, address: str, *, prefills: bool = False) -> Replica:
        """Add a replica; it gets requests once it has answered. prefills: see frontend/fleet/dispatch.py.

        If it is already in the fleet, it gets this role for requests placed from now on.
        """
        replica = self._replicas.find(address)
        if replica is not None:
            self._replicas.set_role(replica, prefills=prefills)
            replica.is_leaving, replica.move_at = False, None
            if replica.state is ReplicaState.LEAVING:
                self._open(replica)
            return replica
        replica = self._replicas.add(address, prefills=prefills)
        self._say_hello(replica)
        return replica

    def remove(self, replica: Replica) -> None:
        """Remove a replica whose requests have moved."""
        self._retry_at.pop(replica.row, None)
        self.on_session_end(replica.row)
        self._dispatch.index.forget(replica.row)
        self._replicas.remove(replica)
        self._orders.append(Close(replica.row))

    def welcome(self, replica: Replica, welcome: Welcome) -> None:
        """Open the session, or refuse the replica."""
        model = self.model
        if welcome.major != PROTOCOL_MAJOR:
            reason = f"it uses protocol {welcome.major}.{welcome.minor}, the fleet {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"
        elif model is None:
            self.model, reason = welcome, ""
        else:
            reason = why_another(model, welcome)
        if reason:
            self.refuse(replica, reason)
            return
        replica.welcome, replica.reason = welcome, ""
        replica.session_token = welcome.session_token
        replica.heartbeat_s = welcome.limits.heartbeat_ms / 1000
        if replica.is_leaving:
            replica.state = ReplicaState.LEAVING
        else:
            self._open(replica)
        self._orders.append(Send(replica.row, encode(FollowKVEvents(_FOLLOW_CALL))))

    def refuse(self, replica: Replica, reason: str) -> None:
        """Place no requests there, and send Hello again later: another engine may answer at its address by then."""
        replica.state, replica.reason, replica.welcome = ReplicaState.REFUSED, reason, None
        self._replicas.is_open[replica.row] = False
        self._orders.append(Close(replica.row))
        self._retry_at[replica.row] = -1.0

    def retry_later(self, replica: Replica, reason: str) -> None:
        """Note that a connection has ended before the session was open, and say Hello again later."""
        if replica.state is not ReplicaState.REFUSED:
            replica.state, replica.reason = ReplicaState.LOST, reason
        self._orders.append(Close(replica.row))
        self._retry_at[replica.row] = -1.0

    def refused(self, replica: Replica, refused: Refused) -> None:
        """Note that a replica has refused the fleet."""
        self.refuse(replica, f"it refused the fleet: {refused.message} ({ErrorCode(refused.code).name})")

    def end_session(self, replica: Replica, reason: str) -> None:
        """Note that a session has ended, and connect again."""
        replica.welcome, replica.state, replica.reason = None, ReplicaState.LOST, reason
        replica.num_lost += 1
        replica.has_picture, replica.heartbeat_s, replica.asked_at = False, 0.0, None
        self.on_session_end(replica.row)
        if not replica.is_leaving:
            self._say_hello(replica)

    def close(self, replica: Replica) -> None:
        """Place no more requests there."""
        self._replicas.is_open[replica.row] = False

    def tick(self, now: float) -> float:
        """Do what is due: heartbeats, Hellos, replicas that were full; return when the next action is due."""
        due = now + 3600.0
        for row, at in list(self._retry_at.items()):
            if at < 0:
                at = self._retry_at[row] = now + _RETRY_S
            if at <= now:
                del self._retry_at[row]
                self._say_hello(self._replicas.by_row[row])
            else:
                due = min(due, at)
        for replica in self._replicas.by_row.values():
            if replica.state is ReplicaState.FULL:
                if replica.full_until <= now:
                    self._dispatch.reopen(replica)
                else:
                    due = min(due, replica.full_until)
            if replica.heartbeat_s and replica.welcome is not None:
                if replica.send_at <= now:
                    replica.send_at = now + replica.heartbeat_s
                    self._orders.append(Send(replica.row, _HEARTBEAT))
                due = min(due, replica.send_at)
            if replica.move_at is not None:
                due = min(due, replica.move_at)
            if replica.welcome is not None and self._replicas.live[replica.row]:
                if replica.asked_at is None and now - replica.heard_at >= SILENCE_S:
                    replica.asked_at = now
                    self._orders.append(Send(replica.row, _ASK))
                due = min(due, (replica.heard_at if replica.asked_at is None else replica.asked_at) + SILENCE_S)
        return due

    def hear(self, replica: Replica, now: float) -> None:
        """Note that a replica has said something."""
        replica.heard_at, replica.asked_at = now, None

    def is_silent(self, replica: Replica, now: float) -> bool:
        """Return whether a replica was asked for a sign of life, and has given none in time."""
        return replica.asked_at is not None and now - replica.asked_at >= SILENCE_S

    def _open(self, replica: Replica) -> None:
        replica.state = ReplicaState.OPEN
        self._replicas.is_open[replica.row] = True

    def _say_hello(self, replica: Replica) -> None:
        hello = Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, self._name, replica.session_token)
        self._orders.append(Open(replica.row, replica.address, encode(hello)))


def why_another(model: Welcome, welcome: Welcome) -> str:
    """Return why an engine cannot serve together with the one described by `model`; "" if it can."""
    if welcome.model_fingerprint != model.model_fingerprint:
        return (
            f"another model: {welcome.model_name} ({welcome.model_fingerprint}), but the fleet serves "
            f"{model.model_name} ({model.model_fingerprint})"
        )
    if welcome.numerics != model.numerics:
        return f"its numerics level is {welcome.numerics}, but the fleet's is {model.numerics}"
    lengths = welcome.limits.max_model_len, model.limits.max_model_len
    if lengths[0] != lengths[1]:  # a request without max_tokens would end at another position
        return (
            f"its max_model_len is {lengths[0]}, but the fleet's is {lengths[1]}: streams may end at another position"
        )
    if welcome.tokenizer_hash != model.tokenizer_hash:
        return f"its tokenizer differs ({welcome.tokenizer_hash}, but the fleet's is {model.tokenizer_hash})"
    return ""


def fleet_welcome(model: Welcome, replicas: list[Replica], **own: object) -> Welcome:
    """Return a fleet's description of itself: the model's properties, and bounds like one engine as large as all
    replicas together.

    own: fields that are the fleet's own, such as engine_id.
    """
    limits = [one.welcome.limits for one in replicas if one.welcome is not None] or [model.limits]
    together = msgspec.structs.replace(
        model.limits,
        max_num_seqs=sum(one.max_num_seqs for one in limits),
        max_num_queued_requests=sum(one.max_num_queued_requests for one in limits),
        max_num_queued_tokens=sum(one.max_num_queued_tokens for one in limits),
        max_client_bytes=sum(one.max_client_bytes for one in limits),
        max_message_bytes=min(one.max_message_bytes for one in limits),
        heartbeat_ms=0,
        lease_ms=0,
        resume_ms=0,
    )
    return msgspec.structs.replace(model, epoch=0, pid=0, limits=together, features=None, **own)
