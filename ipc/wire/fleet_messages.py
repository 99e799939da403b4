"""Messages on fleets: the calls by which a router's owner sees and changes its replicas (docs/scale_out.md).

An engine answers them with CallFailed: it has no replicas.
"""

from enum import IntEnum

import msgspec

from ipc.wire.call import Call

NO_FLEET = "this is one engine, not a router: it has no replicas"


class ReplicaChange(IntEnum):
    """What happens to a replica."""

    JOIN = 0  # the fleet connects to it and gives it requests; one that computes prompts for others does so no more
    LEAVE = 1  # it gets no more requests, and leaves the fleet after its last one
    JOIN_PREFILL = 2  # as JOIN, and it computes long prompts for the others


class GetReplicas(Call, frozen=True, array_like=True, tag=40):
    """Ask for the replicas of a fleet. Answered by ReplicaList."""


class ChangeReplica(Call, frozen=True, array_like=True, tag=41):
    """Owner only. Let a replica join or leave. Answered by CallDone at once: ask GetReplicas for the rest."""

    change: ReplicaChange
    address: str
    move_after_ms: int = -1  # of LEAVE: then what still runs there goes on elsewhere; -1 = never


class ReplicaStatus(msgspec.Struct, frozen=True, array_like=True):
    """One replica, as the fleet sees it."""

    address: str
    state: str  # open, full, draining, leaving, connecting, lost, refused
    reason: str  # of lost and refused, in words
    engine_id: str  # "" without a session
    num_live: int  # requests of this fleet
    num_queued_tokens: int  # to compute, of requests whose first token has not come
    num_cached_blocks: int  # in the fleet's picture of its prefix cache
    num_lost: int  # sessions with it that have ended unasked


class ReplicaList(msgspec.Struct, frozen=True, array_like=True, tag=94):
    """The replicas of a fleet."""

    call: int
    replicas: list[ReplicaStatus]
    num_queued: int  # requests that wait while no replica takes them
    num_moved: int  # times that a request went on at another replica
