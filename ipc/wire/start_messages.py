"""The messages between an engine process and its owner, over the two pipes between them.

The first pipe, from the owner, is also the engine's lease: when it closes, the engine ends.
"""

from typing import TypeAlias

import msgspec

from ipc.options.config import EngineConfig

#: Exit code of an engine that was told to end for the next one, which its owner starts.
EXIT_RESTART = 75


class Isolate(msgspec.Struct, frozen=True, array_like=True, tag=116):
    """Requests that must not run, by ipc.records.black_box.request_digest(); each message replaces the one before."""

    parked: list[bytes] = []  # they wait: one of them may have killed the engine
    quarantined: list[bytes] = []  # they are refused: they killed it


class Start(msgspec.Struct, frozen=True, array_like=True, tag=111):
    """The first frame, or the second after Prepare: what to run and where to listen."""

    config: EngineConfig
    address: str
    epoch: int = 0  # counts the engine's restarts under one owner
    owner_token: bytes = b""  # a client that sends it in Hello is the owner; empty = no client is
    is_private: bool = False  # the address was made for this engine alone: its directory is removed with it
    isolate: Isolate = Isolate()
    black_box_fd: int = -1  # of a memory file for ipc/records/black_box.py, inherited; -1 = it is not read
    resume_ms: int = 0  # if this engine dies, another replaces it within this time; 0 = none does
    flight_fd: int = -1  # of a memory file for ipc/records/flight_ring.py, inherited; -1 = no flight recorder
    adapters_fd: int = -1  # of a memory file that keeps the names of adapters for the next engine; -1 = none


class Prepare(msgspec.Struct, frozen=True, array_like=True, tag=117):
    """The first frame to a standby: prepare for a later Start with this config, report Prepared, and wait for Start."""

    config: EngineConfig
    loads_model: bool = False  # otherwise only an engine's imports are done in advance


class Drain(msgspec.Struct, frozen=True, array_like=True, tag=112):
    """Accept no more requests, finish the running ones, exit 0. A second one: report to the clients and exit at once,
    143.
    """


class StartPhase(msgspec.Struct, frozen=True, array_like=True, tag=113):
    """Child to parent: a phase of the start has begun."""

    name: str
    seconds: float  # since the process began


class Prepared(msgspec.Struct, frozen=True, array_like=True, tag=118):
    """Child to parent: this standby waits for Start."""

    seconds: float  # since the process began


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=114):
    """Child to parent: the socket answers."""

    address: str
    seconds: float


class StartFailed(msgspec.Struct, frozen=True, array_like=True, tag=115):
    """Child to parent: the start failed; `error` names a class of ipc.errors, or is empty for a bug."""

    error: str
    message: str


OwnerMessage: TypeAlias = Start | Drain | Isolate | Prepare
StartReport: TypeAlias = StartPhase | Ready | StartFailed | Prepared
