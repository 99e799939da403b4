"""A fleet of real processes for faults: four engines of the fake executor, two routers over all of them, and clients.

Every stream of a client that lives is compared with the fake executor's own tokens.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from core.executors.fake import choice_seed
from frontend.client.alternatives import Alternatives
from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from frontend.engine.process import EngineProcess
from ipc.errors import EngineCoreError
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from tests.fake_options import fake_options
from tests.fake_tokens import fake_tokens
from tests.tools.test_cli import command, environment

VOCAB = 1000
CONFIG = EngineConfig(
    executor="fake",
    executor_options=fake_options(vocab_size=VOCAB, step_us=1000, max_model_len=2048),
    num_blocks_override=2000,
    max_num_seqs=64,
    flight_recorder_bytes=0,
)
PATIENCE_S = 120.0  # the machine may be busy; a router that has lost its last replica waits as long
REPLICAS, ROUTERS = ("a", "b", "c", "d"), ("router-1", "router-2")
_VICTIM = """
import sys, time
from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from ipc.params.sampling_params import SamplingParams
client = EngineClient(ZmqTransport(sys.argv[1]))
for number in range(8):
    client.submit([number + 5] * 40, SamplingParams(max_tokens=1900, ignore_eos=True), seed=0)
print("ready", flush=True)
while True:
    time.sleep(1)
"""


def wait_until(is_over: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_over():
        assert time.monotonic() < end, f"{what}: it takes too long"
        time.sleep(0.005)


class Ask(NamedTuple):
    """A request: its prompt, how many tokens it wants, and the seed that they follow; 0 = they are greedy."""

    prompt: list[int]
    max_tokens: int
    seed: int

    def check(self, client: EngineClient, number: int) -> str:
        """Return what is wrong with the answer; "" = nothing is."""
        progress = client.read(number)
        if progress.error is not None:
            return f"lost: {progress.error}"
        found, wanted = progress.token_ids.tolist(), fake_tokens(self.prompt, self.max_tokens, VOCAB, self.seed)
        return "" if found == wanted else f"different: {found} and not {wanted}"


class FleetSite:
    """The processes. Everything that was killed comes back by restore()."""

    def __init__(self, folder: Path, num_clients: int) -> None:
        self._folder = folder
        self._engines: dict[str, EngineProcess] = {}
        self._routers: dict[str, subprocess.Popen[str]] = {}
        self._victim: subprocess.Popen[str] | None = None
        self.clients: list[EngineClient] = []
        try:
            self.restore(with_victim=False)
            for number in range(num_clients):
                addresses = [self._at(name) for name in ROUTERS]
                places = Alternatives(addresses[number % 2 :] + addresses[: number % 2])
                transport = ZmqTransport(places.first, locate=places, grace=PATIENCE_S)
                self.clients.append(EngineClient(transport, hello_timeout=PATIENCE_S))
        except BaseException:
            self.close()
            raise

    def _at(self, name: str) -> str:
        return f"ipc://{self._folder}/{name}"

    def restore(self, *, with_victim: bool) -> None:
        """Start what is missing, and wait until all of it serves."""
        new = {name: EngineProcess(CONFIG, listen=self._at(name)) for name in REPLICAS if name not in self._engines}
        for engine in new.values():
            engine.start()
        self._engines |= new
        for engine in new.values():
            engine.wait_ready()
        for name in ROUTERS:
            if name not in self._routers:
                self._start_router(name)
        for name in ROUTERS:
            self._wait_open(name)
        if with_victim and self._victim is None:
            code = [sys.executable, "-c", _VICTIM, self._at(ROUTERS[0])]
            self._victim = subprocess.Popen(code, env=environment(), stdout=subprocess.PIPE, text=True)
            assert self._victim.stdout is not None
            assert self._victim.stdout.readline() == "ready\n"

    def _start_router(self, name: str) -> None:
        self._routers[name] = router = subprocess.Popen(
            [
                *command("route", "--listen", self._at(name), "--patience", str(int(PATIENCE_S))),
                *("--resume-timeout", str(int(PATIENCE_S)), "--replica"),
                *map(self._at, REPLICAS),
            ],
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert router.stdout is not None
        line = router.stdout.readline()
        assert line.startswith("engine-core: ready at "), line

    def _wait_open(self, name: str) -> None:
        def is_open() -> bool:
            states = [one.state for one in client.replicas().replicas]
            return states == ["open"] * len(REPLICAS)

        client = EngineClient(ZmqTransport(self._at(name)), hello_timeout=PATIENCE_S)
        try:
            wait_until(is_open, f"the replicas of {name}")
        finally:
            client.close()

    def kill(self, name: str) -> None:
        """SIGKILL an engine, a router or the clients' fellow "client"."""
        if name in REPLICAS:
            engine = self._engines.pop(name)
            os.kill(engine.pid, signal.SIGKILL)
            engine.close()
            return
        if name == "client":
            killed, self._victim = self._victim, None
        else:
            killed = self._routers.pop(name)
        if killed is not None:
            _end(killed)

    def num_live(self) -> int:
        """Return the number of requests in the replicas, of any client."""
        num_live = 0
        for name, engine in self._engines.items():
            client = EngineClient(ZmqTransport(self._at(name)), owner_token=engine.owner_token)
            try:
                statistics = client.statistics()
            finally:
                client.close()
            num_live += statistics.num_running + statistics.num_waiting
        return num_live

    def close(self) -> None:
        """End everything."""
        for client in self.clients:
            with contextlib.suppress(EngineCoreError):
                client.close()
        for process in (*self._routers.values(), *([self._victim] if self._victim else [])):
            _end(process)
        for engine in self._engines.values():
            engine.close()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


class FleetRun:
    """Requests and faults on a site, both drawn from a seed.

    A batch of requests is sent, processes are killed when a drawn share of it has ended, and the next batch begins when
    all of this one has: two deaths that meet one request could accuse it of both (docs/scale_out.md).
    """

    def __init__(self, site: FleetSite, seed: int) -> None:
        self._site, self._rng = site, random.Random(seed)
        self._begins = [[self._rng.randrange(5, VOCAB) for _ in range(96)] for _ in range(6)]
        self.wrong: list[str] = []
        self.num_ended = self.num_tokens = 0
        self.kills: dict[str, int] = {}

    def batch(self, size: int) -> None:
        """Send this many requests, kill somebody meanwhile, and check each of them."""
        asked = [self._submit(place % len(self._site.clients)) for place in range(size)]
        share, names = int(size * self._rng.uniform(0, 0.6)), self._victims()
        left, num_ended = dict(enumerate(asked)), 0
        end = time.monotonic() + PATIENCE_S
        while left:
            for key, (client, number, ask) in list(left.items()):
                if client.read(number).finish or client.read(number).error is not None:
                    self._take(client, number, ask)
                    del left[key]
                    num_ended += 1
            if names and num_ended >= share:
                for name in names:
                    self._site.kill(name)
                names = []
            assert time.monotonic() < end, f"{len(left)} of {size} requests are lost: they do not end"
            time.sleep(0.002)
        for name in names:
            self._site.kill(name)
        self._site.restore(with_victim=True)

    def _take(self, client: EngineClient, number: int, ask: Ask) -> None:
        if text := ask.check(client, number):
            self.wrong.append(text)
        self.num_ended += 1
        self.num_tokens += ask.max_tokens

    def _submit(self, place: int) -> tuple[EngineClient, int, Ask]:
        rng, client = self._rng, self._site.clients[place]
        prompt = [*rng.choice(self._begins)[: rng.randrange(1, 97)], rng.randrange(5, VOCAB)]
        is_sampled, seed, max_tokens = rng.random() < 0.5, rng.randrange(2**32), rng.randrange(5, 60)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.8 if is_sampled else 0.0, ignore_eos=True)
        number = client.submit(prompt, params, seed=seed)
        return client, number, Ask(prompt, max_tokens, choice_seed(seed, 0) if is_sampled else 0)

    def _victims(self) -> Sequence[str]:
        """Draw who is killed in this batch: at most one engine, one router and the client."""
        rng = self._rng
        names = [rng.choice(REPLICAS), rng.choice(ROUTERS), "client"]
        chosen = [name for name, chance in zip(names, (0.7, 0.4, 0.4), strict=True) if rng.random() < chance]
        for name in chosen:
            kind = "replica" if name in REPLICAS else name.partition("-")[0]
            self.kills[kind] = self.kills.get(kind, 0) + 1
        return chosen
