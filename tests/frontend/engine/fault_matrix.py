"""One cell of the fault matrix: a fault, its victim and the moment, in real processes, against golden streams.

The service is `engine-core serve` with the fake executor. 64 streams of a client that knows only its address are
compared with undisturbed ones, token by token. What a cell may end in is in `promise()`.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from ipc.errors import EngineCoreError
from ipc.sampling_params import SamplingParams
from tests.frontend.engine.supervised import undisturbed
from tools.control import read_owner_file

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 40.0
NUM_STREAMS, PROMPT, SHORTEST, LONGER = 64, 40, 60, 2  # stream n has SHORTEST + LONGER * n tokens
POISON_TOKEN = 999

SIGNALS = {
    "KILL": [signal.SIGKILL],
    "SEGV": [signal.SIGSEGV],
    "ABRT": [signal.SIGABRT],
    "STOP": [signal.SIGSTOP],
    "TERM": [signal.SIGTERM],
    "TERM2": [signal.SIGTERM, signal.SIGTERM],
    "INT": [signal.SIGINT],
}
POISONS = {"exception": "raise", "busy": "hang", "MemoryError": "memory"}
FAULTS = (*SIGNALS, *POISONS)
MOMENTS = ("starting", "idle", "prefill", "decode", "finishing", "draining", "upgrading", "restarting")
VICTIMS = ("engine", "client", "supervisor")

#: Tokens that a poisoned row has when it does harm, by moment.
_PLACES = {"idle": 0, "prefill": 0, "decode": PROMPT + 20, "finishing": PROMPT + 70}
_LATER = PROMPT + 30

_CLIENT = """
import signal, sys, time
from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from ipc.sampling_params import SamplingParams
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

    No request can poison an engine that starts or a supervisor, which runs none; a client's start is nobody else's
    affair.
    """
    cells = [Cell(fault, victim, moment) for victim in VICTIMS for moment in MOMENTS for fault in FAULTS]
    return [
        cell
        for cell in cells
        if not (cell.fault in POISONS and (cell.victim == "supervisor" or cell[1:] == ("engine", "starting")))
        and cell[1:] != ("client", "starting")
    ]


def promise(cell: Cell) -> str:
    """Return "exact" (every stream is whole), or "told" (the service may end as it was told: what came is right)."""
    fault, victim, moment = cell
    if victim == "client":
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


class Service:
    """`engine-core serve` at one address, started anew where the fault was its supervisor's."""

    def __init__(self, folder: Path, fault: str, moment: str) -> None:
        self.address, self.owner_file = f"ipc://{folder}/s", str(folder / "owner")
        self._options = ["--fake-vocab-size", "1000", "--max-num-seqs", str(NUM_STREAMS + 8), "--fake-step-us", "2000"]
        self._options += ["--max-num-batched-tokens", "96", "--restarts", "60", "--hang-timeout", "0.5"]
        self._options += ["--start-timeout", "5", "--owner-file", self.owner_file, "--listen", self.address]
        self._options += ["--executor", "fake"]
        if fault in POISONS:
            self._options += ["--fake-poison", f"{POISONS[fault]}:{POISON_TOKEN}:{_PLACES.get(moment, _LATER)}"]
        self.process = self._spawn()

    def _spawn(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "engine_core", "serve", *self._options]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        return subprocess.Popen(command, env=environment, **pipes)  # type: ignore[call-overload,no-any-return]

    def wait_ready(self) -> bool:
        """Return whether it became ready."""
        assert self.process.stdout is not None
        return "ready" in self.process.stdout.readline()

    def start_again(self) -> None:
        """Start it at its address, as a service manager does with a service that has died."""
        self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = self._spawn()

    def engine_pid(self, *, other_than: int = 0) -> int:
        """Return the engine's process, as soon as there is one."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(OSError):
                for task in os.listdir(f"/proc/{self.process.pid}/task"):
                    for pid in Path(f"/proc/{self.process.pid}/task/{task}/children").read_text().split():
                        if int(pid) != other_than and b"-m\0core" in Path(f"/proc/{pid}/cmdline").read_bytes():
                            return int(pid)
            time.sleep(0.002)
        return 0

    def close(self) -> None:
        """End it, and all that it has started."""
        engine = 0 if self.process.poll() is not None else self.engine_pid()
        for pid in filter(None, (engine, self.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Streams:
    """The 64 streams of one client, and what they must be."""

    def __init__(self, address: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.client = EngineClient(ZmqTransport(address, grace=PATIENCE_S), hello_timeout=5.0)
                break
            except EngineCoreError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
        self.numbers: list[int] = []
        self.prompts = np.full((NUM_STREAMS, PROMPT), 7)
        self.prompts[:, 0] = np.arange(NUM_STREAMS)

    def submit(self) -> None:
        """Send all requests."""
        for index, prompt in enumerate(self.prompts.tolist()):
            length = SHORTEST + LONGER * index
            params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            self.numbers.append(self.client.submit(prompt, params, seed=0))

    def submit_poison(self) -> None:
        """Send the request that does harm; it fails alone, and is not looked at."""
        params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
        self.client.submit([POISON_TOKEN] + [7] * (PROMPT - 1), params, seed=0)

    def warm_up(self) -> None:
        """Run a request, so that the usual time of a step is known: the first step of all may take 300 s."""
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        number = self.client.submit([8] * PROMPT, params, seed=0)
        while not self.client.read(number).finish:
            self.client.wait(np.array([number]), timeout=0.5)

    def wait_for(self, is_reached: Callable[[list[int], int], bool]) -> None:
        """Wait until is_reached(tokens of each stream, number of finished ones), or all have finished."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            progress = [self.client.read(number) for number in self.numbers]
            num_finished = sum(bool(one.finish) for one in progress)
            if is_reached([len(one.token_ids) for one in progress], num_finished) or num_finished == NUM_STREAMS:
                return
            time.sleep(0.002)

    def finish(self) -> None:
        """Wait for all ends."""
        end = time.monotonic() + PATIENCE_S
        while left := [number for number in self.numbers if not self.client.read(number).finish]:
            with contextlib.suppress(EngineCoreError):
                self.client.wait(np.array(left), timeout=0.5)
            if self.client.error is not None:
                return
            assert time.monotonic() < end, f"{len(left)} streams hang"

    def check(self, kind: str) -> None:
        """Compare every stream with its golden one: whole, or for "told" as far as it came."""
        golden = undisturbed(self.prompts, SHORTEST + LONGER * NUM_STREAMS)
        for index, number in enumerate(self.numbers):
            progress, length = self.client.read(number), SHORTEST + LONGER * index
            tokens = progress.token_ids
            assert (tokens == golden[index, : len(tokens)]).all(), f"stream {index} has other tokens"
            if kind == "exact":
                assert progress.error is None, f"stream {index}: {progress.error}"
                assert len(tokens) == length, f"stream {index}: {len(tokens)} of {length} tokens"
            else:
                is_over = len(tokens) == length or progress.error is not None or self.client.error is not None
                assert is_over, f"stream {index} was told nothing"


@contextlib.contextmanager
def _victim_client(address: str, fault: str) -> "Iterator[subprocess.Popen[str]]":
    process = subprocess.Popen(
        [sys.executable, "-c", _CLIENT, address, fault],
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


def run_cell(cell: Cell, folder: Path) -> None:
    """Play one cell. Errors: AssertionError that says what was lost."""
    service = Service(folder, "" if cell.victim == "client" else cell.fault, cell.moment)
    try:
        if cell.moment == "starting":
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
            _play(cell, service, other)
    finally:
        service.close()


def _play(cell: Cell, service: Service, other: "subprocess.Popen[str] | None") -> None:
    try:
        streams = Streams(service.address)
    except EngineCoreError:
        assert promise(cell) == "told"
        return
    try:
        if cell.moment not in ("starting",):
            _reach_and_strike(cell, service, streams, other)
        if cell.moment in ("starting", "idle"):
            with contextlib.suppress(*([EngineCoreError] if promise(cell) == "told" else [])):
                streams.submit()
        streams.finish()
        if cell.fault == "STOP" and cell.victim == "supervisor":
            os.kill(service.process.pid, signal.SIGCONT)
        streams.check(promise(cell))
    finally:
        streams.client.close()


def _reach_and_strike(cell: Cell, service: Service, streams: Streams, other: "subprocess.Popen[str] | None") -> None:
    engine = streams.client.welcome.pid
    has_poison = cell.fault in POISONS and cell.victim == "engine"
    if cell.moment != "idle":
        streams.submit()
    elif has_poison:
        streams.warm_up()
    if has_poison and cell.moment != "finishing":
        streams.submit_poison()
    match cell.moment:
        case "prefill":
            streams.wait_for(lambda lengths, _: sum(lengths) > 0)
        case "decode" | "draining" | "upgrading" | "restarting":
            streams.wait_for(lambda lengths, _: min(lengths) >= 5)
        case "finishing":
            streams.wait_for(lambda _, num_finished: num_finished >= NUM_STREAMS // 4)
            if has_poison:
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
    for number in SIGNALS[cell.fault]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        time.sleep(0.05 if cell.fault == "TERM2" else 0)
    if cell.victim == "supervisor" and cell.fault in ("KILL", "SEGV", "ABRT"):
        service.start_again()
        assert service.wait_ready()
    elif (
        cell.victim == "supervisor" and cell.fault == "STOP" and cell.moment in ("starting", "upgrading", "restarting")
    ):
        time.sleep(0.5)
        os.kill(pid, signal.SIGCONT)
