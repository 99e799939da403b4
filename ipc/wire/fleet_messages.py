"""Messages on fleets: the calls by which a router's owner sees and changes its replicas (docs/scale_out.md).

An engine answers them with CallFailed: it has no replicas.
"""

from enum import IntEnum

import msgspec

from ipc.wire.call import Call

NO_FLEET = "this is one engine, not a router: it has no replicas"


class ReplicaChange(IntEnum):
    """A change to a replica."""

    JOIN = 0  # the fleet connects to it and gives it requests; if it computed prompts for others, it stops that
    LEAVE = 1  # it gets no more requests, and leaves the fleet after its last one
    JOIN_PREFILL = 2  # as JOIN, but it computes long prompts for the others


class GetReplicas(Call, frozen=True, array_like=True, tag=40):
    """Ask for the replicas of a fleet. Answered by ReplicaList."""


class ChangeReplica(Call, frozen=True, array_like=True, tag=41):
    """Owner only. Let a replica join or leave. Answered by CallDone at once: ask GetReplicas for the rest."""

    change: ReplicaChange
    address: str
    move_after_ms: int = -1  # for LEAVE: after that, requests that still run there continue elsewhere; -1 = never


class ReplicaStatus(msgspec.Struct, frozen=True, array_like=True):
    """One replica, as the fleet sees it."""

    address: str
    state: str  # open, full, draining, leaving, connecting, lost, refused
    reason: str  # for lost and refused, as text
    engine_id: str  # "" without a session
    num_live: int  # requests of this fleet
    num_queued_tokens: int  # to compute, of requests whose first token has not arrived
    num_cached_blocks: int  # in the fleet's view of its prefix cache
    num_lost: int  # sessions with it that have ended unexpectedly


class ReplicaList(msgspec.Struct, frozen=True, array_like=True, tag=94):
    """The replicas of a fleet."""

    call: int
    replicas: list[ReplicaStatus]
    num_queued: int  # requests that wait because no replica takes them
    num_moved: int  # times that a request continued at another replica
