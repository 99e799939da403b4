"""`engine-core route` as processes: engines of the fake executor, a router, clients, and kill -9."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from core.executors.fake import choice_seed
from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from frontend.engine.process import EngineProcess
from ipc.errors import CallFailedError
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from tests.fake_options import fake_options
from tests.fake_tokens import fake_tokens
from tests.frontend.fleet import stand
from tests.frontend.fleet.stand import Stand
from tools.commands import control

VOCAB = 1000
CONFIG = EngineConfig(
    executor="fake",
    executor_options=fake_options(vocab_size=VOCAB, step_us=2000, max_model_len=2048),
    num_blocks_override=2000,
    max_num_seqs=64,
)
_PATIENCE_S = 40.0


class Router:
    """A router process, and engines that it may route to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"ipc://{folder}/router"
        self.owner_file = str(folder / "owner")
        self._engines: dict[str, EngineProcess] = {}
        self._router: subprocess.Popen[str] | None = None

    def at(self, name: str) -> str:
        return f"ipc://{self.folder}/{name}"

    def start_engines(self, *names: str, config: EngineConfig = CONFIG) -> None:
        new = {name: EngineProcess(config, listen=self.at(name)) for name in names}
        self._engines |= new
        for engine in new.values():
            engine.start()
        for engine in new.values():
            engine.wait_ready()

    def start(self, *names: str, options: Sequence[str] = ()) -> str:
        """Start the router; return its first line."""
        command = [
            sys.executable,
            "-m",
            "engine_core",
            "route",
            "--listen",
            self.address,
            "--owner-file",
            self.owner_file,
        ]
        self._router = subprocess.Popen(
            [*command, "--replica", *map(self.at, names), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._router.stdout is not None
        return self._router.stdout.readline()

    def kill_engine(self, name: str) -> None:
        engine = self._engines.pop(name)
        os.kill(engine.pid, signal.SIGKILL)
        engine.close()

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Let no engine run anything meanwhile."""
        owners = [
            EngineClient(ZmqTransport(one.address), owner_token=one.owner_token) for one in self._engines.values()
        ]
        try:
            for owner in owners:
                owner.pause()
            yield
            for owner in owners:
                owner.resume()
        finally:
            for owner in owners:
                owner.close()

    def control(self, *words: str) -> None:
        assert control.main([*words, "--connect", self.address, "--owner-file", self.owner_file]) == 0

    def end(self, number: int = signal.SIGTERM) -> int:
        assert self._router is not None
        router, self._router = self._router, None
        router.send_signal(number)
        status = router.wait(_PATIENCE_S)
        for stream in (router.stdout, router.stderr):
            assert stream is not None
            stream.close()
        return status

    def close(self) -> None:
        if self._router is not None:
            self.end(signal.SIGKILL)
        for engine in self._engines.values():
            engine.close()


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    router = Router(tmp_path)
    try:
        yield router
    finally:
        router.close()


@contextlib.contextmanager
def client_of(address: str) -> Iterator[EngineClient]:
    client = EngineClient(ZmqTransport(address))
    try:
        yield client
    finally:
        client.close()


def wait_until(is_over: Callable[[], bool]) -> None:
    end = time.monotonic() + _PATIENCE_S
    while not is_over():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.01)


class Ask(NamedTuple):
    """A request: its prompt, its tokens' number, and the seed that the fake executor's tokens follow."""

    prompt: list[int]
    max_tokens: int
    seed: int


def submit(client: EngineClient, count: int, max_tokens: int) -> dict[int, Ask]:
    """Submit requests, half of them sampled; return them by their numbers."""
    asked = {}
    for index in range(count):
        prompt, seed = [5 + index, *range(20, 52)], index * (index % 2)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.8 * (index % 2), ignore_eos=True)
        number = client.submit(prompt, params, seed=seed)
        asked[number] = Ask(prompt, max_tokens, choice_seed(seed, 0) if index % 2 else 0)
    return asked


def check(client: EngineClient, asked: dict[int, Ask]) -> None:
    """Wait for the requests, and check that each has got exactly its tokens."""
    wait_until(lambda: all(client.read(number).finish for number in asked))
    for number, ask in asked.items():
        progress = client.read(number)
        assert progress.error is None, progress.error
        assert progress.token_ids.tolist() == fake_tokens(ask.prompt, ask.max_tokens, VOCAB, ask.seed)


def test_64_streams_go_on_exactly_when_a_replica_is_killed(router: Router) -> None:
    router.start_engines("a", "b", "c")
    assert "numerics L2, 3 replicas" in router.start("a", "b", "c")
    with client_of(router.address) as client:
        asked = submit(client, 64, 120)
        wait_until(lambda: all(len(client.read(number).token_ids) > 5 for number in asked))
        router.kill_engine("a")
        check(client, asked)
        states = {one.address: one for one in client.replicas().replicas}
        assert states[router.at("a")].state == "lost"
        assert states[router.at("a")].num_lost == 1
        assert client.replicas().num_moved >= 10
        statistics = client.statistics()
        assert statistics.num_blocks == 2 * 2000
        with pytest.raises(CallFailedError, match="only the owner"):
            client.join(router.at("d"))
        with pytest.raises(CallFailedError, match="follow each replica's"):
            client.follow_kv_events()
    assert router.end() == 0


def test_placements_are_those_of_virtual_time(router: Router) -> None:
    """The same requests in the same order, to processes and to a fleet in virtual time."""
    chance, names = random.Random(4), ("a", "b", "c")
    played = Stand(3, config=stand.CONFIG)
    router.start_engines(*names, config=stand.CONFIG)
    router.start(*names)
    begins = [[chance.randrange(5, 400) for _ in range(60)] for _ in range(4)]
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    placements: list[tuple[int, int]] = []  # (replica of the process, replica of the played fleet)
    number = 0
    with client_of(router.address) as client:
        live = [0, 0, 0]
        for _ in range(6):
            asked = []
            with router.standing_still():
                for _ in range(chance.randrange(1, 7)):
                    prompt = [*chance.choice(begins)[: chance.randrange(1, 61)], chance.randrange(5, 400)]
                    salt = chance.choice(["", "", "x"])
                    asked.append(client.submit(prompt, params, seed=0, cache_salt=salt))
                    played.submit(1, number, prompt, max_tokens=5, cache_salt=salt)
                    number += 1
                    before, live = live, [one.num_live for one in client.replicas().replicas]
                    (place,) = [row for row in range(3) if live[row] > before[row]]
                    placements.append((place, int(played.placed[-1].removeprefix("ipc:///"))))
            played.run()
            wait_until(lambda asked=asked: all(client.read(one).finish for one in asked))
            pictures = [played.fleet.dispatch.index.num_blocks(row) for row in range(3)]
            wait_until(lambda due=pictures: [one.num_cached_blocks for one in client.replicas().replicas] == due)
            live = [0, 0, 0]
    real, virtual = zip(*placements, strict=True)
    assert real == virtual
    assert set(real) == {0, 1, 2}
    assert router.end() == 0


def test_a_rolling_upgrade_under_load(router: Router, capsys: pytest.CaptureFixture[str]) -> None:
    router.start_engines("a", "b")
    router.start("a", "b")
    with client_of(router.address) as client:
        asked = submit(client, 24, 200)
        for old, new in (("a", "c"), ("b", "d")):
            router.start_engines(new)
            router.control("join", router.at(new))
            wait_until(
                lambda new=new: {one.address: one.state for one in client.replicas().replicas}[router.at(new)] == "open"
            )
            router.control("leave", router.at(old), "--move-after", "0.05")
            wait_until(lambda old=old: router.at(old) not in {one.address for one in client.replicas().replicas})
            router.kill_engine(old)
        check(client, asked)
    router.control("replicas")
    shown = capsys.readouterr().out
    assert router.at("c") in shown
    assert router.at("a") not in shown
    with pytest.raises(CallFailedError, match="is not a replica of this fleet"):
        router.control("leave", router.at("a"))
    assert router.end() == 0


def test_http_and_control_on_top_of_a_router(router: Router, tmp_path: Path) -> None:
    router.start_engines("a", "b")
    router.start("a", "b")
    command = [sys.executable, "-m", "engine_core", "http", "--connect", router.address, "--http", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            assert server.stdout is not None
            url = next(word for word in server.stdout.readline().split() if word.startswith("http://"))
            body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "model": "fake", "return_token_ids": True}
            request = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
                assert json.load(answer)["choices"][0]["token_ids"] == fake_tokens([5, 6, 7], 4, VOCAB)
        finally:
            server.terminate()
            server.wait(_PATIENCE_S)
    router.control("pause")
    with client_of(router.address) as client:
        asked = submit(client, 2, 8)
        (waiting, _) = client.explain().requests
        assert waiting.reason.name == "PAUSED"
        router.control("resume")
        check(client, asked)
    router.control("drain")
    assert router.end() == 0


def test_no_replica_answers(router: Router) -> None:
    command = [sys.executable, "-m", "engine_core", "route", "--listen", router.address, "--start-timeout", "0.3"]
    ended = subprocess.run([*command, "--replica", router.at("a")], capture_output=True, text=True, timeout=_PATIENCE_S)
    assert ended.returncode == 1
    assert "no replica has answered within 0.3 s" in ended.stderr
    assert router.at("a") in ended.stderr
    twice = subprocess.run(
        [*command, "--replica", "ipc:///a", "ipc:///a"], capture_output=True, text=True, timeout=_PATIENCE_S
    )
    assert "given twice, by --replica or --prefill" in twice.stderr
