"""Leases and lost connections seen from the client: what was submitted goes on, exactly."""

import contextlib
import os
import signal
import socket as sockets
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from frontend.engine.process import EngineProcess
from frontend.llm import LLM
from ipc.errors import CallFailedError, EngineDeadError
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import Abort, AddRequest, FinishReason, GetStatistics, Hello, PauseMode
from tests.fake_options import fake_options
from tests.fake_tokens import fake_tokens
from tests.frontend.conftest import PlayedEngine

VOCAB = 1000
LEASE_MS = 400
CONFIG = EngineConfig(
    executor="fake", executor_options=fake_options(vocab_size=VOCAB), max_model_len=20_000, client_lease_ms=LEASE_MS
)
PARAMS = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, max_tokens=1500, ignore_eos=True)


class Proxy:
    """A tcp relay that can be cut. `num_connections`: since the start."""

    def __init__(self, address: str) -> None:
        self._target = ("127.0.0.1", int(address.rpartition(":")[2]))
        self._listener = sockets.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_connections = 0
        self._open: list[sockets.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = sockets.create_connection(self._target)
                self.num_connections += 1
                self._open += [near, far]
                for source, sink in ((near, far), (far, near)):
                    self._start(self._relay, source, sink)

    def _relay(self, source: sockets.socket, sink: sockets.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(sockets.SHUT_RDWR)

    def cut(self) -> None:
        """Cut the connection in the middle of the bytes in flight."""
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(sockets.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the second time
            self._listener.shutdown(sockets.SHUT_RDWR)
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()
        for one in (self._listener, *self._open):
            one.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with EngineProcess(CONFIG, listen="tcp://127.0.0.1:0") as engine:
        yield engine


@pytest.fixture
def proxy(engine: EngineProcess) -> Iterator[Proxy]:
    proxy = Proxy(engine.address)
    yield proxy
    proxy.close()


def test_cut_connections_lose_double_and_change_nothing(engine: EngineProcess, proxy: Proxy) -> None:
    stopping = {prompt: _stopping(prompt) for prompt in range(24, 36)}
    client = EngineClient(ZmqTransport(proxy.address))
    first_token = client.welcome.session_token
    numbers = [
        client.submit([number, 7], SEEDED if number % 2 else PARAMS, seed=number, streaming=True)
        for number in range(24)
    ]
    stops = {client.submit([n, 7], params, seed=n, streaming=True): n for n, params in stopping.items()}
    aborted = client.submit([1], SamplingParams(max_tokens=15_000, ignore_eos=True), seed=0)
    for cut in range(4):
        client.wait(np.array(numbers))
        if cut == 0:
            assert not any(client.read(number).finish for number in numbers)
        proxy.cut()
        if cut == 1:
            client.abort([aborted])  # whether it reaches the old session, or none, or the new one
        while proxy.num_connections < cut + 2:
            time.sleep(0.001)
    client.abort([aborted])
    deadline = time.monotonic() + 30
    while unfinished := [n for n in [*numbers, *stops, aborted] if not client.read(n).finish]:
        client.wait(np.array(unfinished), timeout=0.5)
        assert time.monotonic() < deadline
    for number in numbers:
        tokens = client.read(number).token_ids.tolist()
        assert tokens == _expected([number, 7], 1500, number if number % 2 else 0), number
    for number, prompt in stops.items():
        progress, expected = client.read(number), _expected([prompt, 7], 50 * (prompt - 20) + 1, 0)
        assert progress.token_ids.tolist() == expected
        assert (progress.finish, progress.stop_token) == (FinishReason.STOP, expected[-1])
    assert client.read(aborted).finish == FinishReason.ABORT
    assert client.welcome.session_token != first_token
    statistics = client.statistics()
    assert (statistics.num_running, statistics.num_waiting) == (0, 0)
    assert statistics.num_free_blocks == statistics.num_blocks - 1
    client.close()


def _stopping(prompt: int) -> SamplingParams:
    """Ends by a stop token, each prompt somewhere else among the cuts."""
    index = 50 * (prompt - 20)
    stop = _expected([prompt, 7], index + 1, 0)[index]
    return msgspec.structs.replace(PARAMS, stop_token_ids=[stop], min_tokens=index + 1)


def _expected(prompt: list[int], count: int, seed: int) -> list[int]:
    return fake_tokens(prompt, count, VOCAB, seed)


def test_an_engine_that_stays_away_is_an_error_after_the_grace(engine: EngineProcess, proxy: Proxy) -> None:
    client = EngineClient(ZmqTransport(proxy.address, grace=0.3))
    number = client.submit([1], SamplingParams(max_tokens=15_000, ignore_eos=True), seed=0)
    proxy.close()
    with pytest.raises(EngineDeadError, match=r"closed the connection and did not answer again within 0\.3 s"):
        client.wait(np.array([number]))
    client.close()


def test_an_idle_client_beats_and_lives(engine: EngineProcess) -> None:
    client = EngineClient(ZmqTransport(engine.address))
    assert client.welcome.limits.lease_ms == LEASE_MS
    time.sleep(4 * LEASE_MS / 1000)
    assert client.statistics().num_running == 0
    client.close()


def test_a_stopped_engine_does_not_hold_its_own_silence_against_clients(engine: EngineProcess) -> None:
    client = EngineClient(ZmqTransport(engine.address))
    os.kill(engine.pid, signal.SIGSTOP)
    time.sleep(2 * LEASE_MS / 1000)
    os.kill(engine.pid, signal.SIGCONT)
    time.sleep(LEASE_MS / 2000)
    assert client.statistics().num_running == 0
    client.close()


def test_an_embedded_engine_needs_no_heartbeats_and_obeys_its_owner() -> None:
    made: list[LLM] = []
    thread = threading.Thread(
        target=lambda: made.append(
            LLM(
                executor="fake",
                executor_options=fake_options(vocab_size=VOCAB),
                client_lease_ms=100,
                skip_tokenizer_init=True,
            )
        )
    )
    thread.start()
    thread.join()  # and with it the thread that has started the engine
    with made[0] as llm:
        client = llm.client
        assert (client.welcome.limits.heartbeat_ms, client.welcome.limits.lease_ms) == (0, 0)
        time.sleep(0.3)
        (output,) = llm.generate([{"prompt_token_ids": [1, 2]}], SamplingParams(temperature=0.0, max_tokens=4))
        assert len(output.outputs[0].token_ids) == 4
        client.pause(PauseMode.NEW)
        client.resume()
        assert client.model_information().executor == "fake"
        client.shutdown()
        with pytest.raises(EngineDeadError, match=r"its owner has shut it down|exited with code 0"):
            llm.generate([{"prompt_token_ids": [1, 2]}])


def test_drain_by_a_call() -> None:
    with EngineProcess(CONFIG) as engine:
        transport = ZmqTransport(engine.address, pidfd=engine.pidfd, describe_exit=engine.describe_exit)
        client = EngineClient(transport, owner_token=engine.owner_token)
        number = client.submit([5], PARAMS, seed=0)
        client.drain()
        client.wait(np.array([number]))
        assert client.read(number).token_ids.tolist() == _expected([5], 1500, 0)
        assert engine.wait(10.0)
        assert engine.describe_exit().endswith("exited with code 0")
        client.close()


# --- against a played engine: each step of a loss by itself ---


def test_what_is_submitted_again(played_engine: PlayedEngine) -> None:
    client = EngineClient(played_engine)
    fresh, begun, done, stopped, gone = (client.submit([n], PARAMS, seed=n, deadline_ms=60_000) for n in range(5))
    played_engine.feed(begun, 0, [8, 9])
    played_engine.feed(done, 0, [8], FinishReason.STOP)
    played_engine.feed(stopped, 0, [8])
    client.abort([stopped])
    client.discard([gone])
    played_engine.answers[GetStatistics] = lambda _: None
    pool: list[BaseException] = []

    def call() -> None:
        try:
            client.statistics()
        except CallFailedError as error:
            pool.append(error)

    calling = threading.Thread(target=call)
    calling.start()
    while not played_engine.sent(GetStatistics):
        time.sleep(0.001)
    played_engine.received.clear()
    played_engine.welcome = msgspec.structs.replace(played_engine.welcome, session_token=b"n" * 16)
    played_engine.cut()
    calling.join(5.0)
    assert "the connection to the engine was lost" in str(pool[0])
    hello, *again = played_engine.received
    assert isinstance(hello, Hello)
    assert hello.session_token == b"t" * 16
    assert [type(one) for one in again] == [AddRequest, AddRequest]
    requests = {one.number: one for one in again if isinstance(one, AddRequest)}
    assert requests.keys() == {fresh, begun}
    assert requests[fresh].delivered == [b""]
    assert requests[begun].delivered == [np.array([8, 9], "<i4").tobytes()]
    assert all(0 < one.deadline_ms <= 60_000 and one.seed == one.number for one in requests.values())
    assert client.read(stopped).finish == FinishReason.ABORT
    played_engine.feed(begun, 2, [7], FinishReason.LENGTH)
    assert client.read(begun).token_ids.tolist() == [8, 9, 7]
    played_engine.received.clear()
    played_engine.cut()
    assert played_engine.received[0] == msgspec.structs.replace(hello, session_token=b"n" * 16, num_resumed=1)
    client.close()


def test_choices_that_stop_strings_have_ended_are_not_computed_again(played_engine: PlayedEngine) -> None:
    client = EngineClient(played_engine)
    number = client.submit([1], msgspec.structs.replace(SEEDED, n=3), seed=0)
    other = client.submit([1], PARAMS, seed=0)
    client.abort([number], [2])
    played_engine.received.clear()
    played_engine.cut()
    _, again, abort, last = played_engine.received
    assert isinstance(again, AddRequest)
    assert isinstance(last, AddRequest)
    assert (again.number, last.number) == (number, other)
    assert abort == Abort(np.array([number], "<u4").tobytes(), np.array([2], "<u2").tobytes())
    client.close()
