"""An engine that dies while another one with the same model is there: its clients' requests go on, exactly."""

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import lru_cache

import msgspec
import numpy as np
import pytest

from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from frontend.engine.process import EngineProcess
from ipc.errors import EngineDeadError
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest
from tests.fake_options import fake_options, with_options
from tests.fake_tokens import fake_tokens
from tests.frontend.conftest import PlayedEngine

VOCAB = 1000
CONFIG = EngineConfig(executor="fake", executor_options=fake_options(vocab_size=VOCAB), max_model_len=20_000)
LENGTH = 1500  # tokens of each stream
PATIENCE_S = 30.0


def params(seed: int) -> SamplingParams:
    return SamplingParams(temperature=float(seed > 0), max_tokens=LENGTH, ignore_eos=True)


def submit_all(client: EngineClient) -> list[int]:
    """Greedy streams have seed 0."""
    seeds = [number if number % 2 else 0 for number in range(6)]
    return [client.submit([number, 7], params(seed), seed=seed, streaming=True) for number, seed in enumerate(seeds)]


def check_all(client: EngineClient, numbers: list[int]) -> None:
    """Every stream ends as it would have done undisturbed."""
    deadline = time.monotonic() + PATIENCE_S
    while unfinished := [number for number in numbers if not client.read(number).finish]:
        client.wait(np.array(unfinished), timeout=0.5)
        assert time.monotonic() < deadline
    for number in numbers:
        expected = undisturbed(number, number if number % 2 else 0)
        assert client.read(number).token_ids.tolist() == expected, number


@lru_cache
def undisturbed(number: int, seed: int) -> list[int]:
    return fake_tokens([number, 7], LENGTH, VOCAB, seed)


def kill(engine: EngineProcess) -> None:
    os.kill(engine.pid, signal.SIGKILL)


@pytest.mark.parametrize("listen", [None, "tcp://127.0.0.1:0"], ids=["ipc", "tcp"])
def test_streams_go_on_at_another_address(listen: str | None) -> None:
    with EngineProcess(CONFIG, listen=listen) as first, EngineProcess(CONFIG, listen=listen) as second:
        where = [first.address]
        client = EngineClient(ZmqTransport(first.address, locate=lambda: where[0], grace=PATIENCE_S))
        lost = client.welcome
        numbers = submit_all(client)
        client.wait(np.array(numbers))
        assert not any(client.read(number).finish for number in numbers)
        where[0] = second.address
        kill(first)
        check_all(client, numbers)
        assert client.welcome.engine_id != lost.engine_id
        assert client.statistics().num_running == 0
        client.close()


def test_it_is_asked_again_until_an_engine_answers() -> None:
    """What is submitted while no engine is there begins at the next one."""
    with EngineProcess(CONFIG) as first:
        where, asked = [first.address], threading.Event()

        def locate() -> str:
            asked.set()
            return where[0]

        client = EngineClient(ZmqTransport(first.address, locate=locate, grace=PATIENCE_S))
        numbers = submit_all(client)
        client.wait(np.array(numbers))
        kill(first)
        assert asked.wait(PATIENCE_S)
        numbers += [client.submit([len(numbers), 7], params(0), seed=0, streaming=True)]
        with EngineProcess(CONFIG) as second:
            where[0] = second.address
            check_all(client, numbers)
            client.close()


def refused(second: EngineConfig | None, locate: Callable[[str], str | None]) -> str:
    """What a client whose engine is killed is told; second: another engine, whose address `locate` gets."""
    with EngineProcess(CONFIG) as first, EngineProcess(second or CONFIG) as other:
        address = other.address
        client = EngineClient(ZmqTransport(first.address, locate=lambda: locate(address), grace=PATIENCE_S))
        number = client.submit([1], msgspec.structs.replace(params(0), max_tokens=15_000), seed=0)
        kill(first)
        with pytest.raises(EngineDeadError) as caught:
            client.wait(np.array([number]), timeout=PATIENCE_S)
        client.close()
        return str(caught.value)


def test_another_model_is_not_given_the_requests() -> None:
    other = with_options(CONFIG, executor_options=fake_options(eos_token_id=5))
    text = refused(other, lambda address: address)
    assert "the engine was restarted while the connection was lost, and another model answers: " in text


def test_another_length_is_not_given_the_requests(played_engine: PlayedEngine) -> None:
    """A request without max_tokens would end elsewhere than undisturbed."""
    client = EngineClient(played_engine)
    number = client.submit([1], params(0), seed=0)
    limits = played_engine.welcome.limits
    longer = msgspec.structs.replace(limits, max_model_len=limits.max_model_len + 1)
    played_engine.welcome = msgspec.structs.replace(played_engine.welcome, engine_id="another", limits=longer)
    played_engine.cut()
    with pytest.raises(EngineDeadError, match=f"its max_model_len is {longer.max_model_len}, not"):
        client.wait(np.array([number]), timeout=PATIENCE_S)
    client.close()


def test_an_engine_that_does_not_come_back_is_an_error_at_once() -> None:
    began = time.monotonic()
    assert refused(None, lambda address: None).endswith("closed the connection and does not come back")
    assert time.monotonic() - began < PATIENCE_S


def test_below_l2_requests_are_lost(played_engine: PlayedEngine) -> None:
    played_engine.welcome = msgspec.structs.replace(played_engine.welcome, numerics="L0")
    client = EngineClient(played_engine)
    number = client.submit([1], params(0), seed=0)
    played_engine.welcome = msgspec.structs.replace(played_engine.welcome, engine_id="another")
    played_engine.cut()
    with pytest.raises(EngineDeadError, match="its tokens may differ at numerics level L0 before and L0 now"):
        client.wait(np.array([number]))
    client.close()


def test_outputs_of_the_next_epoch_are_taken(played_engine: PlayedEngine) -> None:
    client = EngineClient(played_engine)
    number = client.submit([1], params(0), seed=0)
    played_engine.feed(number, 0, [8])
    played_engine.received.clear()
    changes = {"engine_id": "another", "epoch": played_engine.welcome.epoch + 1, "numerics": "L2"}
    played_engine.welcome = msgspec.structs.replace(played_engine.welcome, **changes)
    played_engine.cut()
    (again,) = [one for one in played_engine.received if isinstance(one, AddRequest)]
    assert again.delivered == [np.array([8], "<i4").tobytes()]
    assert client.welcome.epoch == played_engine.welcome.epoch
    client.close()
