"""Many clients of one engine, some of them hostile: everybody else's tokens are right, and everything comes back."""

import os
import random
import signal
import socket as sockets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from frontend.engine.process import EngineProcess
from ipc.options.config import EngineConfig
from ipc.wire.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Abort,
    AddRequest,
    CallFailed,
    ErrorCode,
    FinishReason,
    Goodbye,
    Heartbeat,
    Hello,
    Outputs,
    Pause,
    PauseMode,
    Refused,
    RequestFailed,
    Statistics,
    Welcome,
    encode,
)
from tests.columns import pack_numbers
from tests.core.running_engine import VOCAB, expected
from tests.fake_options import fake_options
from tests.ipc.wire.test_messages import CLIENT_MESSAGES, mutate
from tests.placed import placed
from tests.raw_client import PATIENCE_S, RawClient, request

ROOT = Path(__file__).resolve().parent.parent
CONFIG = EngineConfig(
    executor="fake",
    executor_options=fake_options(vocab_size=VOCAB),
    max_model_len=20_000,
    max_num_seqs=24,
    num_blocks_override=4000,
)
MAX_GROWTH_BYTES = 64 << 20  # of the engine's memory under attack; what it takes is a few MiB


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with EngineProcess(CONFIG) as engine:
        yield engine


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def wait_until_free(client: RawClient) -> None:
    end = time.monotonic() + PATIENCE_S
    while (now := client.statistics()).num_running + now.num_waiting or now.num_free_blocks != now.num_blocks - 1:
        assert time.monotonic() < end, now
        time.sleep(0.005)


#: One client process: submits, says so, and according to its role finishes ("stay") or leaves in mid-stream.
CLIENT = """
import sys, time
import numpy as np
from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from ipc.params.sampling_params import SamplingParams
from tests.core.running_engine import expected
address, role, me = sys.argv[1], sys.argv[2], int(sys.argv[3])
client = EngineClient(ZmqTransport(address))
length = 1500 if role == "stay" else 15_000
params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
numbers = [client.submit([me, n, 3], params, seed=0, streaming=role != "stay") for n in range(6)]
if role != "stay":
    while not all(len(client.read(n).token_ids) for n in numbers[:1]):
        client.wait(np.array(numbers))
    print("in mid-stream", flush=True)
    sys.stdin.readline()
else:
    waiting = list(numbers)
    while waiting:
        done = set(client.wait(np.array(waiting)).tolist())
        waiting = [n for n in waiting if n not in done]
    wrong = [n for n in numbers if client.read(n).token_ids.tolist() != expected([me, n, 3], length)]
    print("wrong:", wrong, flush=True)
client.close()
"""


def test_eight_processes_two_killed_two_leaving(engine: EngineProcess) -> None:
    def run(role: str, me: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", placed(CLIENT), engine.address, role, str(me)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )

    with RawClient(engine.address) as before:
        wait_until_free(before)
    roles = ["stay", "kill", "leave", "stay", "kill", "leave", "stay", "stay"]
    children = [run(role, me) for me, role in enumerate(roles)]
    for role, child in zip(roles, children, strict=True):
        assert child.stdin is not None
        assert child.stdout is not None
        if role != "stay":
            assert child.stdout.readline() == "in mid-stream\n"
        if role == "kill":
            os.kill(child.pid, signal.SIGKILL)
        elif role == "leave":
            child.stdin.write("\n")
            child.stdin.flush()
    for role, child in zip(roles, children, strict=True):
        text, _ = child.communicate(timeout=60)
        assert text == ("wrong: []\n" if role == "stay" else "")
        assert child.returncode == (-signal.SIGKILL if role == "kill" else 0)
    with RawClient(engine.address) as after:
        wait_until_free(after)
        assert after.statistics().num_finished >= 4 * 6


# --- hostile bytes -----------------------------------------------------------------------------------------------


class Witness:
    """Streams that run through an attack; check() looks at all their tokens so far and keeps two in flight."""

    def __init__(self, address: str) -> None:
        self.client = RawClient(address)
        self._next = 0
        self._live: list[int] = []
        self.num_finished = 0

    def check(self) -> None:
        while len(self._live) < 2:
            self.client.add(self._next, [self._next % VOCAB, 1], max_tokens=300)
            self._live.append(self._next)
            self._next += 1
        number = self._live.pop(0)
        assert self.client.finish(number) == [expected([number % VOCAB, 1], 300)], number
        self.num_finished += 1


@pytest.mark.parametrize("count", [1_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_live_mutated_frames(engine: EngineProcess, count: int) -> None:
    rng = random.Random(count)
    frames = [encode(message) for message in CLIENT_MESSAGES]
    frames += [encode(request(number, [1, 2], max_tokens=50)) for number in range(20)]
    witness = Witness(engine.address)
    before = resident_bytes(engine.pid)
    for _ in range(count // 100):
        with RawClient(engine.address) as rude:
            for _ in range(100):  # most sessions end before that
                rude.send(mutate(rng, frames))
        witness.check()
    wait_until_idle_but(witness)
    assert resident_bytes(engine.pid) - before < MAX_GROWTH_BYTES
    witness.client.close()


def wait_until_idle_but(witness: Witness) -> None:
    """The rude clients' requests are gone; the witness has finished all that it looks at."""
    for _ in range(3):
        witness.check()
    end = time.monotonic() + PATIENCE_S
    while (now := witness.client.statistics()).num_running + now.num_waiting > 1:
        assert time.monotonic() < end, now


@pytest.mark.parametrize("count", [1_000, pytest.param(20_000, marks=pytest.mark.soak)])
def test_raw_connections(engine: EngineProcess, count: int) -> None:
    rng = random.Random(count)
    path = engine.address.removeprefix("ipc://")
    greeting = bytes.fromhex("ff00000000000000017f0300") + b"NULL" + bytes(48)
    witness = Witness(engine.address)
    before = resident_bytes(engine.pid)
    for turn in range(count):
        with sockets.socket(sockets.AF_UNIX) as raw:
            raw.connect(path)
            data = rng.randbytes(rng.randrange(200))
            raw.sendall(greeting[: rng.randrange(70)] + data if turn % 2 else data)
        if turn % 50 == 0:
            witness.check()
    witness.check()
    assert resident_bytes(engine.pid) - before < MAX_GROWTH_BYTES
    assert len(os.listdir(f"/proc/{engine.pid}/fd")) < 100
    witness.client.close()


# --- the protocol as a state machine -----------------------------------------------------------------------------


class ProtocolMachine(RuleBasedStateMachine):
    """One client that does anything a client may do, in any order; a small model says what it must get."""

    address = ""

    @initialize()
    def connect(self) -> None:
        self.client = RawClient(self.address)
        self.begin_session()

    def begin_session(self) -> None:
        self.client.tokens, self.client.finished = {}, {}
        self.requests: dict[int, AddRequest] = {}
        self.aborted: set[int] = set()
        self.refused: dict[int, int] = {}  # times a number was refused with ALREADY_EXISTS
        self.num_malformed = 0

    def take(self, message: object) -> None:
        if isinstance(message, RequestFailed):
            assert message.code == ErrorCode.ALREADY_EXISTS, message
            self.refused[message.number] -= 1
        else:
            assert isinstance(message, Outputs), message

    def receive(self, kind: type) -> object:
        while not isinstance(message := self.client.receive_any(), kind):
            self.take(message)
        return message

    @rule(
        number=st.integers(0, 12), prompt=st.lists(st.integers(0, 9), min_size=1, max_size=40), count=st.integers(1, 60)
    )
    def add(self, number: int, prompt: list[int], count: int) -> None:
        message = request(number, prompt, count)
        if number in self.requests:
            self.refused[number] = self.refused.get(number, 0) + 1
            message = request(number, [*prompt, 11, 12], count)  # never the same as the first
        else:
            self.requests[number] = message
        self.client.send(message)

    @rule(number=st.integers(0, 12))
    def abort(self, number: int) -> None:
        if number in self.requests:
            self.aborted.add(number)
        self.client.send(Abort(pack_numbers([number, number, 77])), Heartbeat())

    @rule()
    def statistics(self) -> None:
        self.client.send(encode(Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "again")))
        self.receive(Welcome)

    @rule()
    def owner_call(self) -> None:
        self.client.send(Pause(3, PauseMode.ALL))
        failed = self.receive(CallFailed)
        assert isinstance(failed, CallFailed)
        assert failed.code == ErrorCode.PERMISSION_DENIED

    @rule()
    def garbage(self) -> None:
        if self.num_malformed < 8:
            self.num_malformed += 1
            self.client.send(b"\xc1")
            self.receive(Refused)

    @rule()
    def finish_all(self) -> None:
        """Whatever was asked is answered, and with the right tokens."""
        while not self.client.finished.keys() >= self.requests.keys() or any(self.refused.values()):
            self.take(self.client.receive_any())
        for number, message in self.requests.items():
            prompt = list(memoryview(message.prompt_token_ids).cast("i"))
            tokens, finish = self.client.tokens[number], self.client.finished[number]
            count = message.params.max_tokens or 0
            assert tokens == expected(prompt, len(tokens))
            assert (finish, len(tokens)) == (FinishReason.LENGTH, count) or number in self.aborted

    @rule(politely=st.booleans())
    def leave_and_come_back(self, politely: bool) -> None:
        if politely:
            self.client.send(Goodbye())
        self.client.close()
        self.connect()

    def teardown(self) -> None:
        if hasattr(self, "client"):
            self.finish_all()
            self.client.send(Goodbye())
            self.client.close()


@pytest.mark.parametrize("examples", [20, pytest.param(3_000, marks=pytest.mark.soak)])
def test_protocol_state_machine(engine: EngineProcess, examples: int) -> None:
    ProtocolMachine.address = engine.address
    run_state_machine_as_test(
        ProtocolMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    with RawClient(engine.address) as watch:
        wait_until_free(watch)
        assert isinstance(watch.statistics(), Statistics)
