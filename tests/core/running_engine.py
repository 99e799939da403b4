"""A whole engine in the process of a test: its IO thread, and its loop with the fake executor in another thread."""

import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq

from core.border.io_thread import IOThread
from core.border.preparation import Preparer
from core.border.reception import Served
from core.border.zap import start_zap
from core.engine import EngineCore
from core.execution.executor import UpdatesWeights
from core.executors.fake import FakeExecutor, create
from core.features.store import Features
from core.process import loop as process
from ipc.wire.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Hello,
    Limits,
    ModelInformation,
    Statistics,
    TokenizerFiles,
    Welcome,
)
from ipc.wire.sockets import Context, bind_router, private_ipc_address, remove_private_address
from tests.fake_options import fake_options
from tests.fake_tokens import fake_tokens
from tests.raw_client import PATIENCE_S, RawClient
from tests.resolved import resolved_config

VOCAB = 1000
NUM_ROWS = 8
CONFIG = resolved_config(
    max_num_seqs=NUM_ROWS,
    max_num_batched_tokens=512,
    block_size=16,
    num_blocks_override=8000,
    max_model_len=15_000,
    executor_options=fake_options(vocab_size=VOCAB),
)
OWNER_TOKEN = b"o" * 16
LONG = 14_000  # tokens: more than any test waits for
LEASE_MS = 1200  # longer than a test is stopped on a loaded machine


class Running:
    """A whole engine in this process: its IO thread, and its loop in a thread of its own."""

    def __init__(
        self,
        limits: Limits,
        preparer: Preparer | None = None,
        epoch: int = 0,
        features: Features | None = None,
        executor: FakeExecutor | None = None,
    ) -> None:
        self.address = private_ipc_address()
        context: Context = zmq.Context()
        start_zap(context)
        welcome = Welcome(PROTOCOL_MAJOR, PROTOCOL_MINOR, "test", "id", epoch, b"", "m", "00", "", "L2", VOCAB, limits)
        model = ModelInformation(
            0, "m", "00", "L2", "fake", "float32", VOCAB, [2], 15_000, NUM_ROWS, 512, 8000, 16, True
        )
        served = Served(welcome, TokenizerFiles(0, "", {}), model, OWNER_TOKEN)
        if features is not None:
            served = msgspec.structs.replace(served, features=features)
            preparer = features
        executor = executor or create(CONFIG)
        updates = executor if isinstance(executor, UpdatesWeights) else None
        preparers = [] if preparer is None else [preparer]
        self.io = IOThread(context, bind_router(context, self.address), served, preparers, updates=updates)
        executor.initialize_cache(CONFIG)
        self.engine = EngineCore(CONFIG, executor)
        self.io.start()
        self._loop = threading.Thread(target=process.run, args=(self.engine, self.io, executor.prepare_ahead))
        self._loop.start()

    def wait_end(self, seconds: float = PATIENCE_S) -> None:
        self._loop.join(seconds)
        assert not self._loop.is_alive()

    def close(self) -> None:
        self.io.drain()
        self.wait_end()
        assert not any(thread.name == "io" for thread in threading.enumerate())
        remove_private_address(self.address)


def limits(**changes: int) -> Limits:
    values = {
        "max_model_len": 15_000,
        "max_num_seqs": NUM_ROWS,
        "max_message_bytes": 8 << 20,
        "max_num_queued_requests": 1000,
        "max_num_queued_tokens": 2**26,
        "max_client_bytes": 2**28,
        "heartbeat_ms": LEASE_MS // 3,
        "lease_ms": LEASE_MS,
        "max_logprobs": 20,
    }
    return Limits(**(values | changes))


@pytest.fixture(name="start")
def start_engine() -> Iterator[Callable[..., Running]]:
    running: list[Running] = []

    def start(
        preparer: Preparer | None = None, epoch: int = 0, features: Features | None = None, **changes: int
    ) -> Running:
        running.append(Running(limits(**changes), preparer, epoch, features))
        return running[-1]

    yield start
    for one in running:
        one.close()


def expected(prompt: list[int], count: int) -> list[int]:
    """What the engine must answer to a greedy request."""
    return fake_tokens(prompt, count, VOCAB)


def owner(running: Running) -> RawClient:
    client = RawClient(running.address, hello=False)
    client.send(Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "owner", b"", OWNER_TOKEN))
    client.welcome = client.receive(Welcome)
    return client


def wait_for(client: RawClient, condition: Callable[[Statistics], bool]) -> Statistics:
    end = time.monotonic() + PATIENCE_S
    while not condition(statistics := client.statistics()):
        assert time.monotonic() < end, statistics
        time.sleep(0.005)
    return statistics


def is_free(statistics: Statistics) -> bool:
    idle = statistics.num_running == statistics.num_waiting == 0
    return idle and statistics.num_free_blocks == statistics.num_blocks - 1
