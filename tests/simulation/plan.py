"""Plan: the requests of a client's program, and its actions with their times."""

from enum import Enum
from typing import NamedTuple, TypeAlias

from ipc.params.sampling_params import SamplingParams
from ipc.wire.pin_messages import Pin


class Ask(NamedTuple):
    """A request, as a program asks for it."""

    prompt: list[int]
    params: SamplingParams
    seed: int
    priority: int = 0
    cache_salt: str = ""
    deadline_ms: int = 0
    streaming: bool = True
    pins: tuple[Pin, ...] = ()


class Connect(NamedTuple):
    """Open a session; the other actions do so too where there is none."""


class Submit(NamedTuple):
    ask: int  # index in the plan's asks


class Abort(NamedTuple):
    ask: int
    choices: list[int]  # empty = all


class Discard(NamedTuple):
    ask: int


class Leave(NamedTuple):
    """Say goodbye; what follows in the plan is done by a new client."""


class Call(Enum):
    """A typed call. The caller does not wait, so the answer comes too late. A pause is followed by RESUME."""

    STATISTICS = "statistics"
    EXPLAIN = "explain"
    RESET_PREFIX_CACHE = "reset prefix cache"
    PAUSE_NEW = "pause new"
    PAUSE_ALL = "pause all"
    RESUME = "resume"
    DRAIN = "drain"
    SHUTDOWN = "shutdown"


Action: TypeAlias = Connect | Submit | Abort | Discard | Leave | Call


class Plan(NamedTuple):
    """All that a program does. actions: (ns after the beginning, action). is_tcp: a cut connection is made again within
    grace_ns. follows: each of its clients keeps a copy of the prefix cache."""

    name: str
    is_tcp: bool
    is_owner: bool
    grace_ns: int
    asks: list[Ask]
    actions: list[tuple[int, Action]]
    follows: bool = False
