"""Supervised engines of tests: the fake executor in real processes, their clients, and undisturbed streams."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import numpy as np

from core.executors.fake import _terms, checksum, next_token
from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from frontend.engine.process import EngineProcess
from frontend.engine.restart_policy import RestartRules
from frontend.engine.standby_plan import StandbyKind
from frontend.engine.supervised_engine import SupervisedEngine
from ipc.errors import EngineStartError
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from ipc.tables.arrays import Ints
from tests.fake_options import fake_options

PATIENCE_S = 60.0
EAGER = RestartRules(most=1000, delays_s=(0.0,))
NUM_STREAMS = 64
FAKE = EngineConfig(
    executor="fake", executor_options=fake_options(vocab_size=1000, max_model_len=60_000), max_num_seqs=NUM_STREAMS
)
GREEDY = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)


def kill(engine: EngineProcess, number: int = signal.SIGKILL) -> None:
    """Signal the process; a client may know that there is one before its starter does."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            os.kill(engine.pid, number)
            return
        except EngineStartError:
            if time.monotonic() > end:
                raise
        time.sleep(0.001)


@contextlib.contextmanager
def supervised(
    config: EngineConfig,
    rules: RestartRules = EAGER,
    *,
    standby: StandbyKind = StandbyKind.NO,
    **options: object,
) -> Iterator[SupervisedEngine]:
    process = EngineProcess(config, resume_s=PATIENCE_S, **options)  # type: ignore[arg-type]
    engine = SupervisedEngine(process, rules, standby=standby)
    try:
        engine.start()
        engine.wait_ready()
        yield engine
    finally:
        engine.close()


class Patience:
    """Streams hang if none of them gets a token for PATIENCE_S. How long all take is the machine's affair."""

    def __init__(self, client: EngineClient, numbers: list[int]) -> None:
        self._client, self._numbers, self._num_tokens, self._end = client, numbers, -1, 0.0

    def check(self) -> None:
        num_tokens = sum(len(self._client.read(number).token_ids) for number in self._numbers)
        if num_tokens != self._num_tokens:
            self._num_tokens, self._end = num_tokens, time.monotonic() + PATIENCE_S
        assert time.monotonic() < self._end, f"the streams hang, with {num_tokens} tokens"


def finish(client: EngineClient, numbers: list[int]) -> None:
    patience = Patience(client, numbers)
    while left := [number for number in numbers if not client.read(number).finish]:
        client.wait(np.array(left), timeout=1.0)
        patience.check()


def check(client: EngineClient, numbers: list[int], length: int = 1000) -> None:
    finish(client, numbers)
    due = undisturbed(np.array([[number, 7] for number in numbers]), length)
    for number, tokens in zip(numbers, due, strict=True):
        progress = client.read(number)
        assert progress.error is None, progress.error
        assert (progress.token_ids == tokens).all(), number


def undisturbed(prompts: Ints, length: int) -> Ints:
    """The tokens of greedy streams, all at once."""
    sums = np.array([checksum(prompt) for prompt in prompts], np.uint64)
    seeds, tokens = np.zeros(len(sums), np.uint64), np.zeros((len(sums), length), np.int64)
    for place in range(length):
        positions = np.full(len(sums), prompts.shape[1] + place, np.uint64)
        tokens[:, place] = drawn = next_token(sums, positions, seeds, 1000)
        sums = sums + _terms(drawn, positions)
    return tokens


def connected(engine: SupervisedEngine) -> EngineClient:
    """A client of another owner: it knows nothing but the address."""
    return EngineClient(ZmqTransport(engine.address))


def submit(client: EngineClient, count: int = NUM_STREAMS, params: SamplingParams = GREEDY) -> list[int]:
    return [client.submit([number, 7], params, seed=0) for number in range(count)]


def wait_for_end(engine: SupervisedEngine) -> bool:
    """Return whether it ends, which a client learns by its address."""
    until = time.monotonic() + PATIENCE_S
    while engine.locate() is not None and time.monotonic() < until:
        time.sleep(0.01)
    return engine.locate() is None
