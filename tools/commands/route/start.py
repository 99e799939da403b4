"""The start of a router: its replicas' answers, and the information that it gives its clients."""

import select
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from core.border.reception import Served
from frontend.fleet.driver import Driver
from frontend.fleet.fleet import Fleet
from frontend.fleet.links import Links
from frontend.fleet.membership import fleet_welcome
from frontend.fleet.replicas import ReplicaState
from ipc.errors import EngineDeadError, EngineStartError
from ipc.version import VERSION
from ipc.wire.call import Call
from ipc.wire.messages import (
    CallFailed,
    GetModelInformation,
    GetTokenizer,
    ModelInformation,
    ServerMessage,
    TokenizerFiles,
)

_NOBODY = 0  # client number of the router's own calls
_OTHERS_S = 2.0  # for further replicas to answer and to send what they have cached
_LOOK_MS = 50
_MISSING = (ReplicaState.CONNECTING, ReplicaState.LOST)


class Bounds(NamedTuple):
    """A router's own limits: leases, and the queue; 0 = as long as all replicas' together."""

    lease_ms: int
    resume_ms: int
    max_num_queued_requests: int


def wait_for_replicas(driver: Driver, links: Links, timeout_s: float, is_stopped: Callable[[], bool]) -> None:
    """Wait until all replicas have answered and sent what they have cached, or until some have and the rest does not
    answer.

    Errors: EngineStartError if none has answered within timeout_s seconds.
    """
    begin, first = time.monotonic(), 0.0
    replicas = driver.fleet.replicas
    while not is_stopped():
        now = _turn(driver, links)
        if replicas.sessions:
            first = first or now
            is_whole = all(one.has_picture for one in replicas.sessions)
            if now - first > _OTHERS_S or (
                is_whole and not any(one.state in _MISSING for one in replicas.by_row.values())
            ):
                return
        elif now - begin > timeout_s:
            states = [f"{one.address}: {one.reason or one.state.value}" for one in replicas.by_row.values()]
            raise EngineStartError(f"no replica has answered within {timeout_s:g} s; {'; '.join(states)}")


def ask(driver: Driver, links: Links, call: Call, timeout_s: float) -> ServerMessage:
    """Return a replica's answer to a call of the router's own. Errors: EngineDeadError."""
    fleet, end = driver.fleet, time.monotonic() + timeout_s
    fleet.call(_NOBODY, call, time.monotonic())
    while not fleet.to_clients:
        if _turn(driver, links) > end:
            raise EngineDeadError(f"no replica has answered {type(call).__name__} within {timeout_s:g} s")
    ((_, answer),) = fleet.take_messages()
    if isinstance(answer, CallFailed):
        raise EngineDeadError(f"{type(call).__name__}: {answer.message}")
    return answer


def _turn(driver: Driver, links: Links) -> float:
    """Wait briefly for the replicas and take in what they send; return the time."""
    driver.carry_out(time.monotonic())
    if not links.has_unread:
        select.select([links.fd], [], [], _LOOK_MS / 1000)
    now = time.monotonic()
    driver.look()
    driver.take_in(now)
    driver.pass_time(now)
    return now


def served_by(
    driver: Driver, links: Links, engine_id: str, owner_token: bytes, bounds: Bounds, timeout_s: float
) -> Served:
    """Return the information that the border sends to clients. Errors: EngineDeadError."""
    fleet: Fleet = driver.fleet
    tokenizer = ask(driver, links, GetTokenizer(0), timeout_s)
    model = ask(driver, links, GetModelInformation(0), timeout_s)
    assert isinstance(tokenizer, TokenizerFiles), tokenizer
    assert isinstance(model, ModelInformation), model
    assert fleet.membership.model is not None
    sessions = fleet.replicas.sessions
    welcome = fleet_welcome(
        fleet.membership.model, sessions, engine_id=engine_id, server_version=VERSION, session_token=b""
    )
    limits = msgspec.structs.replace(
        welcome.limits, heartbeat_ms=bounds.lease_ms // 3, lease_ms=bounds.lease_ms, resume_ms=bounds.resume_ms
    )
    if bounds.max_num_queued_requests:
        limits = msgspec.structs.replace(limits, max_num_queued_requests=bounds.max_num_queued_requests)
    return Served(msgspec.structs.replace(welcome, limits=limits), tokenizer, model, owner_token)
