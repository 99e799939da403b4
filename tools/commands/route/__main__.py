"""`engine-core route`: a router in the foreground, which serves several engines as one to clients that connect to its
address.

SIGTERM, SIGINT or SIGHUP drains it: new requests are refused, the running ones finish, exit status 0. A second signal
notifies the clients and stops it at once, exit status 143. The replicas keep running.
"""

import argparse
import contextlib
import os
import secrets
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import zmq

from core import log
from core.border.allow_list import AllowList
from core.border.doorway import raise_descriptor_limit
from core.border.io_thread import IOThread
from core.border.meter import RequestMeter
from core.border.reception import Served
from core.border.zap import start_zap
from core.inputs import (
    BlocksArrived,
    BlocksFound,
    BlocksStored,
    EndPause,
    EngineInput,
    ExecutorLost,
    ExecutorRestored,
    HoldClient,
    NewWeights,
    ReleaseClient,
    RenewKVEvents,
    SetClientWeight,
)
from core.process.garbage import settle_garbage
from core.process.loop import run
from frontend.fleet.driver import Driver
from frontend.fleet.fleet import PREFILL_MIN_TOKENS, Fleet
from frontend.fleet.links import Links
from frontend.fleet.membership import fleet_welcome
from frontend.fleet.placement import POLICIES
from frontend.fleet.replicas import ReplicaState
from ipc.errors import ConfigError, EngineDeadError, EngineStartError
from ipc.log_lines import counted
from ipc.version import VERSION
from ipc.wire.call import Call
from ipc.wire.messages import (
    Abort,
    AddRequest,
    CallFailed,
    EngineStopping,
    GetModelInformation,
    GetTokenizer,
    Goodbye,
    ModelInformation,
    ServerMessage,
    TokenizerFiles,
)
from ipc.wire.pooling_messages import AddPooling
from ipc.wire.sockets import Context, bind_router, check_address, keys_of
from tools.commands.control import write_owner_file
from tools.flags.options import ArgumentParser
from tools.service.notify import notify

# The start of a router: its replicas' answers, and the information that it gives its clients.


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


# RouterEngine: a fleet instead of an engine, behind the engine's own border and loop.


_NS = 1e9


class RouterEngine:
    """core/process/loop.py's Engine. clock: monotonic seconds."""

    def __init__(self, driver: Driver, clock: Callable[[], float] = time.monotonic) -> None:
        self._driver = driver
        self._clock = clock
        self._fleet = driver.fleet

    @property
    def has_work(self) -> bool:
        """Return False: look_ahead() reads what replicas send."""
        return False

    @property
    def has_unfinished(self) -> bool:
        """Return whether there are live requests or calls, or messages from replicas or for clients wait."""
        return self._driver.has_arrived or self._fleet.has_unfinished or bool(self._fleet.to_clients)

    def look_ahead(self) -> bool:
        """Read what replicas have sent; return whether there is anything for the next step."""
        return self._driver.look() or bool(self._fleet.to_clients)

    def count_waiting(self) -> tuple[int, int]:
        """Return the numbers of choices that have not begun, and of their tokens."""
        requests = self._fleet.requests
        return requests.num_waiting, requests.num_waiting_tokens

    def step(self, inbox: Sequence[tuple[int, EngineInput]], now_ns: int) -> Sequence[tuple[int, ServerMessage]]:
        """Take in the messages of clients and replicas; return those for clients.

        After they are sent, turn() follows.
        """
        now = now_ns / _NS
        if not self._driver.has_arrived:  # this step takes in the messages that have woken it, instead of the next one
            self._driver.look()
        self._driver.take_in(now)
        for client, message in inbox:
            self._receive(client, message, now)
        self._driver.carry_out(now)
        return self._fleet.take_messages()

    def turn(self, _: int) -> None:
        """Let the fleet apply the effects of its messages, and do what is due by time."""
        self._driver.pass_time(self._clock())

    def _receive(self, client: int, message: EngineInput, now: float) -> None:
        fleet = self._fleet
        match message:
            case AddRequest() | AddPooling():
                fleet.submit(client, message, now)
            case Abort():
                fleet.abort(client, message)
            case Goodbye():
                fleet.leave(client)
            case HoldClient():
                fleet.hold(client)
            case ReleaseClient():
                fleet.release(client, now)
            case EndPause():
                fleet.resume(now)
            case SetClientWeight() | RenewKVEvents():
                pass  # replicas handle shares, and no client of a fleet follows KV events
            case ExecutorLost() | ExecutorRestored() | BlocksFound() | BlocksArrived() | BlocksStored() | NewWeights():
                pass  # a router has no executor, no blocks and no weights
            case Call():
                fleet.call(client, message, now)


EXIT_STOPPED = 128 + signal.SIGTERM  # stopped before the work was done
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_STOP_S = 2.0  # without progress in reporting the end to the clients
_IDLE_S = 0.5  # between two rounds of an idle loop; each sends heartbeats
_ASK_S = 30.0  # for a replica to hand over its tokenizer


def main(arguments: Sequence[str]) -> int:
    """Route until a signal or the owner ends it; return the exit status. Errors: ConfigError, AddressError,
    EngineStartError if no replica answers.
    """
    parsed = _parse(arguments)
    addresses = _addresses(parsed)
    log.use_format(parsed.log_format)
    raise_descriptor_limit()
    with contextlib.ExitStack() as stack:
        context: Context = zmq.Context()
        keys = keys_of(parsed.listen)
        allowed = None if keys is None else AllowList(keys)
        start_zap(context, allowed)
        router = bind_router(context, parsed.listen)
        links = Links()
        stack.callback(links.end)
        token = secrets.token_bytes(16)
        if parsed.owner_file is not None:
            write_owner_file(parsed.owner_file, token)  # its descriptor stays open, and so locked
            stack.callback(_unlink, parsed.owner_file)
        own = {"patience_s": parsed.patience, "prefill_min_tokens": parsed.prefill_min_tokens}
        fleet = Fleet(policy=parsed.route, seed=parsed.seed, name="router", **own)
        driver, stop = Driver(fleet, links), _Stop()
        stack.callback(stop.end)
        for address in addresses:
            fleet.membership.join(address, prefills=address in parsed.prefill)
        try:
            wait_for_replicas(driver, links, parsed.start_timeout, stop.is_asked)
            bounds = Bounds(
                int(parsed.client_lease * 1000), int(parsed.resume_timeout * 1000), parsed.max_num_queued_requests
            )
            served = served_by(driver, links, secrets.token_hex(8), token, bounds, _ASK_S)
        except BaseException:
            router.close(0)
            context.term()
            raise
        meter = RequestMeter(served.welcome.limits.max_model_len, None)
        at_border = {"meter": meter, "quota_of": None if allowed is None else allowed.quota_of}
        io = IOThread(context, router, msgspec.structs.replace(served, **at_border))
        io.wake_engine_on(links.fd)
        io.start()
        stop.serve(io)
        names = f"{served.welcome.model_name}, numerics {served.welcome.numerics}"
        count = len(fleet.replicas.sessions)
        replicas = counted(count, "replica")
        text = f"engine-core: ready at {router.address} ({names}, {replicas})"
        print(text, flush=True)
        notify(f"READY=1\nSTATUS={text.removeprefix('engine-core: ')}")
        settle_garbage()
        engine = RouterEngine(driver)
        return run(engine, io, engine.look_ahead, engine.turn, _IDLE_S)


def _addresses(parsed: argparse.Namespace) -> list[str]:
    """Return the addresses of all replicas. Errors: AddressError; ConfigError for an address given twice."""
    addresses = [*parsed.replica, *parsed.prefill]
    for address in addresses:
        check_address(address, binding=False)
    if len(set(addresses)) < len(addresses):
        raise ConfigError(f"a replica is given twice, by --replica or --prefill: {' '.join(addresses)}")
    return addresses


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = ArgumentParser(
        prog="engine-core route",
        usage="engine-core route --listen ADDR --replica ADDR [ADDR ...] [OPTION ...]",
        description="Serve several running engines as one.",
    )
    parser.add_argument("--listen", required=True, metavar="ADDR", help="address for clients, as `serve --listen`")
    _add_replicas(parser)
    parser.add_argument(
        "--route",
        choices=tuple(POLICIES),
        default="prefix",
        help="where a request goes: to the replica with the longest cached prefix unless it is too busy, to the "
        "least loaded one, or to each in turn; default: %(default)s",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="decides between equal replicas; default: %(default)d"
    )
    _add_times(parser)
    parser.add_argument("--owner-file", metavar="FILE", help="write what `engine-core control` needs to this new file")
    parser.add_argument(
        "--max-num-queued-requests",
        type=int,
        default=0,
        metavar="N",
        help="most requests that have not begun; 0 = as many as the replicas accept together",
    )
    parser.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="format of the lines on standard error"
    )
    parsed: argparse.Namespace = parser.parse_args(arguments)
    return parsed


def _add_replicas(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--replica",
        required=True,
        nargs="+",
        action="extend",
        metavar="ADDR",
        help="addresses of engines of the same model",
    )
    parser.add_argument(
        "--prefill",
        nargs="+",
        action="extend",
        default=[],
        metavar="ADDR",
        help="engines that compute long prompts for the replicas, which fetch the KV blocks from them (--kv-peers)",
    )
    parser.add_argument(
        "--prefill-min-tokens",
        type=int,
        default=PREFILL_MIN_TOKENS,
        metavar="N",
        help="a prompt is long if it has this many tokens to compute; default: %(default)d",
    )


def _add_times(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--start-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to wait for the first replica; default: %(default)g",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds that requests wait if no replica answers; default: %(default)g",
    )
    parser.add_argument(
        "--resume-timeout",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds that clients wait for the next router at this address; 0 = there is no next one; default: "
        "%(default)g",
    )
    parser.add_argument(
        "--client-lease", type=float, default=30.0, metavar="S", help="seconds of silence that end a client's session"
    )


class _Stop:
    """The signals received so far: the first drains, the second stops at once."""

    def __init__(self) -> None:
        self._count = 0
        self._io: IOThread | None = None
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_: self._tell())

    def is_asked(self) -> bool:
        return self._count > 0

    def serve(self, io: IOThread) -> None:
        """Set the IO thread, which a signal drains from now on."""
        self._io = io
        if self._count:
            io.drain()

    def end(self) -> None:
        """Ignore signals from now on: the end has begun, and with Python's default handlers they would kill the
        process.
        """
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _tell(self) -> None:
        self._count += 1
        if self._io is None:
            sys.exit(EXIT_STOPPED if self._count > 1 else 0)
        if self._count == 1:
            os.write(2, b"engine-core: draining\n")
            notify("STOPPING=1")
            # Not here: the signal may have arrived while this thread holds the lock that drain() takes.
            threading.Thread(target=self._io.drain, daemon=True).start()
        elif self._count == 2:
            threading.Thread(target=self._stop, args=(self._io,), daemon=True).start()

    def _stop(self, io: IOThread) -> None:
        io.finish(EngineStopping("the router was asked to stop at once"), _STOP_S)
        os._exit(EXIT_STOPPED)


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
