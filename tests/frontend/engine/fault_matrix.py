"""One cell of the fault matrix: a fault, its victim and the moment, in real processes, against golden streams.

The service is `engine-core serve` with the fake executor. 64 streams of a client that knows only its address are
compared with undisturbed ones, token by token. What a cell may end in is in `promise()`. Victim "http" is the HTTP
server's process: its callers may be cut, and what they got is right; the 64 streams must be whole.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from ipc.errors import EngineCoreError
from tests.frontend.engine.fault_service import NUM_STREAMS, PATIENCE_S, POISONS, ROOT, Service, Streams
from tests.frontend.engine.http_streams import HttpStreams, free_port
from tests.placed import placed
from tools.commands.control import read_owner_file

SIGNALS = {
    "KILL": [signal.SIGKILL],
    "SEGV": [signal.SIGSEGV],
    "ABRT": [signal.SIGABRT],
    "STOP": [signal.SIGSTOP],
    "TERM": [signal.SIGTERM],
    "TERM2": [signal.SIGTERM, signal.SIGTERM],
    "INT": [signal.SIGINT],
}
FAULTS = (*SIGNALS, *POISONS)
MOMENTS = ("starting", "idle", "prefill", "decode", "finishing", "draining", "upgrading", "restarting")
VICTIMS = ("engine", "client", "supervisor", "standby", "http")

UNPOISONED = ("supervisor", "standby")

_CLIENT = """
import signal, sys, time
from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from ipc.params.sampling_params import SamplingParams
def fault(*_):
    if sys.argv[2] == "exception":
        raise RuntimeError("planted")
    if sys.argv[2] == "MemoryError":
        raise MemoryError("planted")
    while True:
        pass
signal.signal(signal.SIGUSR1, fault)
client = EngineClient(ZmqTransport(sys.argv[1]))
for number in range(8):
    client.submit([number] * 40, SamplingParams(max_tokens=20_000, ignore_eos=True), seed=0)
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


class Cell(NamedTuple):
    """A fault, who suffers it, and when."""

    fault: str
    victim: str
    moment: str

    def __str__(self) -> str:
        return "-".join(self)


def all_cells() -> list[Cell]:
    """Return every cell that exists.

    No request can poison an engine that starts, a supervisor or a standby, which run none; a client's start is nobody
    else's affair.
    """
    cells = [Cell(fault, victim, moment) for victim in VICTIMS for moment in MOMENTS for fault in FAULTS]
    return [
        cell
        for cell in cells
        if not (cell.fault in POISONS and (cell.victim in UNPOISONED or cell[1:] == ("engine", "starting")))
        and cell[1:] != ("client", "starting")
    ]


def promise(cell: Cell) -> str:
    """Return "exact" (every stream is whole), or "told" (the service may end as it was told: what came is right)."""
    fault, victim, moment = cell
    if victim in ("client", "standby", "http"):
        return "exact"
    if victim == "engine":
        if moment == "starting":
            return "exact" if fault == "INT" else "told"
        if fault == "TERM2" or (fault == "TERM" and moment in ("idle", "upgrading", "restarting")):
            return "told"
        return "exact"
    if fault == "TERM2" or (fault in ("TERM", "INT") and moment not in ("prefill", "decode", "finishing")):
        return "told"
    return "exact"


@contextlib.contextmanager
def _victim_client(address: str, fault: str) -> "Iterator[subprocess.Popen[str]]":
    process = subprocess.Popen(
        [sys.executable, "-c", placed(_CLIENT), address, fault],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def run_cell(cell: Cell, folder: Path, *, is_over_http: bool = False) -> None:
    """Play one cell; is_over_http: with streams over HTTP. Errors: AssertionError that says what was lost."""
    fault = "" if cell.victim in ("client", "http") else cell.fault
    port = free_port() if is_over_http or cell.victim == "http" else None
    service = Service(folder, fault, cell.moment, has_standby=cell.victim == "standby", http_port=port)
    try:
        if cell.moment == "starting" and cell.victim not in ("standby", "http"):
            _strike(cell, service, service.engine_pid(), None)
            if promise(cell) == "told" and not service.wait_ready():
                assert service.process.wait(PATIENCE_S) != 0 or cell.fault in ("TERM", "TERM2", "INT"), "it ended well"
                return
        else:
            assert service.wait_ready()
        with contextlib.ExitStack() as stack:
            other = None
            if cell.victim == "client":
                other = stack.enter_context(_victim_client(service.address, cell.fault))
            if cell.victim == "http":
                assert port is not None
                play_http_victim(cell, service, port)
            else:
                _play(cell, service, other, port)
    finally:
        service.close()


def _play(cell: Cell, service: Service, other: "subprocess.Popen[str] | None", port: int | None) -> None:
    try:
        streams = Streams(service.address) if port is None else HttpStreams(service.address, port)
    except EngineCoreError:
        assert promise(cell) == "told"
        return
    try:
        if cell.victim == "standby":
            _strike_standby(cell, service, streams)
        elif cell.moment != "starting":
            _reach_and_strike(cell, service, streams, other)
        if cell.moment in ("starting", "idle"):
            with contextlib.suppress(*([EngineCoreError] if promise(cell) == "told" else [])):
                streams.submit()
        streams.finish()
        if cell.fault == "STOP" and cell.victim == "supervisor":
            os.kill(service.process.pid, signal.SIGCONT)
        streams.check(promise(cell))
    finally:
        streams.close()


def _reach_and_strike(cell: Cell, service: Service, streams: Streams, other: "subprocess.Popen[str] | None") -> None:
    engine = streams.client.welcome.pid
    has_poison = cell.fault in POISONS and cell.victim == "engine"
    if cell.moment != "idle":
        streams.submit()
    elif has_poison:
        streams.warm_up()
    if has_poison and cell.moment != "finishing":
        streams.submit_poison()
    _reach(cell.moment, streams)
    if has_poison and cell.moment == "finishing":
        streams.submit_poison()
    if cell.moment == "draining":
        os.kill(service.process.pid, signal.SIGTERM)
        time.sleep(0.02)
    elif cell.moment == "upgrading":
        _upgrade(service)
        engine = service.engine_pid(other_than=engine)
    elif cell.moment == "restarting":
        os.kill(engine, signal.SIGKILL)
        engine = service.engine_pid(other_than=engine)
    _strike(cell, service, engine, other)


def _reach(moment: str, streams: Streams) -> None:
    """Wait for this moment in the life of the streams."""
    match moment:
        case "prefill":
            streams.wait_for(lambda lengths, _: sum(lengths) > 0)
            streams.wait_until_read()
        case "decode" | "draining" | "upgrading" | "restarting":
            streams.wait_for(lambda lengths, _: min(lengths) >= 5)
        case "finishing":
            streams.wait_for(lambda _, num_finished: num_finished >= NUM_STREAMS // 4)


def play_http_victim(cell: Cell, service: Service, port: int) -> None:
    """Strike the HTTP server under eight callers of its own and 64 streams of another client."""
    (Path(service.owner_file).parent / "fault").write_text(cell.fault)
    streams, callers = Streams(service.address), HttpStreams(service.address, port, 8)
    try:
        if cell.moment not in ("starting", "idle"):
            streams.submit()
            callers.submit()
        elif cell.moment == "starting":
            worker = service.worker_pid()
            os.kill(worker, signal.SIGKILL)
            service.worker_pid(other_than=worker)
        _reach(cell.moment, streams)
        worker = service.worker_pid()
        if cell.moment == "draining":
            os.kill(service.process.pid, signal.SIGTERM)
            time.sleep(0.02)
        elif cell.moment == "upgrading":
            _upgrade(service)
        elif cell.moment == "restarting":
            os.kill(streams.client.welcome.pid, signal.SIGKILL)
        _signal(cell.fault, worker)
        if cell.moment in ("starting", "idle"):
            streams.submit()
            callers.submit()
        streams.finish()
        streams.check("exact")
        if cell.moment != "draining":
            callers.ask_again()
        callers.finish()
        callers.check("told")
    finally:
        streams.close()
        callers.close()


def _strike_standby(cell: Cell, service: Service, streams: Streams) -> None:
    """Strike the standby, and with streams kill the engine that it was for."""
    engine = streams.client.welcome.pid
    standby = service.standby_pid(engine, is_prepared=cell.moment != "starting")
    if cell.moment in ("starting", "idle"):
        _signal(cell.fault, standby)
        return
    streams.submit()
    _reach(cell.moment, streams)
    if cell.moment == "draining":
        os.kill(service.process.pid, signal.SIGTERM)
        time.sleep(0.02)
    elif cell.moment == "upgrading":
        _upgrade(service)
    elif cell.moment == "restarting":
        os.kill(engine, signal.SIGKILL)  # and then the standby, which is taking over
    _signal(cell.fault, standby)
    if cell.moment in ("prefill", "decode", "finishing", "draining"):
        with contextlib.suppress(ProcessLookupError):  # all streams have finished, and it has drained
            os.kill(engine, signal.SIGKILL)


def _signal(fault: str, pid: int) -> None:
    assert pid > 0, "0 would be the tests themselves"
    for number in SIGNALS.get(fault, [signal.SIGUSR2]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        time.sleep(0.05 if fault == "TERM2" else 0)


def _upgrade(service: Service) -> None:
    token = read_owner_file(service.owner_file)
    with contextlib.suppress(EngineCoreError):  # the answer may be lost with the engine
        owner = EngineClient(ZmqTransport(service.address), owner_token=token, hello_timeout=5.0)
        try:
            owner.upgrade()
        finally:
            owner.close()


def _strike(cell: Cell, service: Service, engine: int, other: "subprocess.Popen[str] | None") -> None:
    """Do what the fault is to its victim; a poison does it by itself."""
    if cell.fault in POISONS:
        if other is not None:
            other.send_signal(signal.SIGUSR1)
        return
    pid = {"engine": engine, "supervisor": service.process.pid, "client": 0 if other is None else other.pid}[
        cell.victim
    ]
    _signal(cell.fault, pid)
    if cell.victim == "supervisor" and cell.fault in ("KILL", "SEGV", "ABRT"):
        service.start_again()
        assert service.wait_ready()
    elif (
        cell.victim == "supervisor" and cell.fault == "STOP" and cell.moment in ("starting", "upgrading", "restarting")
    ):
        time.sleep(0.5)
        os.kill(pid, signal.SIGCONT)
