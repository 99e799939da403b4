"""How the engine process ends: signals, and what its owner says on the pipe."""

import os
import signal

import pytest

from frontend.engine.process import EngineProcess
from ipc.errors import EngineStartError
from ipc.options.config import EngineConfig
from ipc.wire.messages import (
    PROTOCOL_MAJOR,
    EngineStopping,
    ErrorCode,
    Hello,
    Outputs,
    Refused,
    RequestFailed,
    ServerMessage,
)
from tests.fake_options import fake_options
from tests.fake_tokens import fake_tokens
from tests.raw_client import PATIENCE_S, RawClient

VOCAB = 1000
CONFIG = EngineConfig(
    executor="fake", executor_options=fake_options(vocab_size=VOCAB, max_model_len=100_000), max_model_len=50_000
)
LONG = 40_000  # tokens: more than any test waits for


def expected(prompt: list[int], count: int = 8) -> list[int]:
    return fake_tokens(prompt, count, VOCAB)


def test_sigterm_drains() -> None:
    with EngineProcess(CONFIG) as engine, RawClient(engine.address) as client:
        client.add(1, [1, 2], max_tokens=3000)
        client.receive(Outputs)
        os.kill(engine.pid, signal.SIGINT)  # ignored: the owner's to decide
        os.kill(engine.pid, signal.SIGTERM)
        wait_until_draining(client)
        client.add(2, [1])
        failed = client.receive(RequestFailed)
        assert (failed.number, failed.code) == (2, ErrorCode.UNAVAILABLE)
        (tokens,) = client.finish(1)
        assert (len(tokens), tokens[:500]) == (3000, expected([1, 2], 500))
        assert client.receive(EngineStopping) == EngineStopping("")
        assert engine.wait(PATIENCE_S)
        assert engine.describe_exit().endswith("exited with code 0")


def test_second_sigterm_stops_at_once() -> None:
    with EngineProcess(CONFIG) as engine, RawClient(engine.address) as client:
        client.add(1, [1, 2], max_tokens=LONG)
        client.receive(Outputs)
        os.kill(engine.pid, signal.SIGTERM)
        wait_until_draining(client)
        os.kill(engine.pid, signal.SIGTERM)
        assert client.receive(EngineStopping).error == "the engine was told to stop at once"
        assert engine.wait(PATIENCE_S)
        assert engine.describe_exit().endswith(f"exited with code {128 + signal.SIGTERM}")


def test_sigterm_to_owner_and_engine_is_once_and_a_second_drain_stops() -> None:
    with EngineProcess(CONFIG) as engine, RawClient(engine.address) as client:
        client.add(1, [1, 2], max_tokens=LONG)
        client.receive(Outputs)
        engine.drain()
        os.kill(engine.pid, signal.SIGTERM)
        wait_until_draining(client)
        assert not engine.wait(0.1)
        engine.drain()
        assert client.receive(EngineStopping).error == "the engine was told to stop at once"
        assert engine.wait(PATIENCE_S)
        assert engine.describe_exit().endswith(f"exited with code {128 + signal.SIGTERM}")


def test_drain_that_comes_with_start_is_heard() -> None:
    engine = EngineProcess(CONFIG)
    engine.start()
    engine.drain()
    with pytest.raises(EngineStartError, match="exited with code 0"):
        engine.wait_ready()


def wait_until_draining(client: RawClient) -> None:
    answer: ServerMessage = client.welcome
    while not isinstance(answer, Refused):
        client.send(Hello(PROTOCOL_MAJOR, 0, "late"))
        while isinstance(answer := client.receive_any(), Outputs):
            pass
    assert answer.code == ErrorCode.UNAVAILABLE
