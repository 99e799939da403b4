"""Keys over a network, with a real engine at all addresses of this machine: who is let in, who is not, and rotation."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from frontend.engine.supervised_engine import SupervisedEngine
from ipc.errors import CallFailedError, EngineDeadError
from ipc.keys.curve import add_client, make_engine_keys, remove_client
from ipc.keys.quota import Quota
from ipc.params.sampling_params import SamplingParams
from tests.fake_options import fake_options, with_options
from tests.frontend.engine.supervised import FAKE, PATIENCE_S, finish, kill, supervised

GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
NO_ANSWER_S = 0.7


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[SupervisedEngine]:
    make_engine_keys(str(tmp_path / "keys"))
    add_client(str(tmp_path / "keys"), "alice", str(tmp_path / "alice"))
    with supervised(FAKE, listen=f"tcp://0.0.0.0:0?keys={tmp_path}/keys") as engine:
        yield engine


def connected(engine: SupervisedEngine, keys: Path | None, seconds: float = PATIENCE_S) -> EngineClient:
    port = engine.address.partition("?")[0].rpartition(":")[2]
    address = f"tcp://127.0.0.1:{port}" + ("" if keys is None else f"?keys={keys}")
    return EngineClient(ZmqTransport(address, grace=PATIENCE_S), hello_timeout=seconds)


def ask(client: EngineClient) -> list[int]:
    number = client.submit([1, 2, 3], GREEDY, seed=0)
    finish(client, [number])
    assert client.read(number).error is None
    return client.read(number).token_ids.tolist()


def test_only_allowed_keys_are_answered(engine: SupervisedEngine, tmp_path: Path) -> None:
    make_engine_keys(str(tmp_path / "others"))
    add_client(str(tmp_path / "others"), "alice", str(tmp_path / "mallory"))
    stranger = (tmp_path / "mallory").read_text()
    own = (tmp_path / "alice").read_text()
    wrong_client = own[: own.index('"engine"')] + stranger[stranger.index('"engine"') :]
    for name, text in (("mallory", stranger), ("wrong-engine", wrong_client)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    stranger_here = tmp_path / "stranger"
    stranger_here.write_text(stranger[: stranger.index('"engine"')] + own[own.index('"engine"') :])
    stranger_here.chmod(0o600)
    for keys in (None, tmp_path / "mallory", tmp_path / "wrong-engine", stranger_here):
        with pytest.raises(EngineDeadError, match=r"no engine answered|refused the connection, as one with"):
            connected(engine, keys, NO_ANSWER_S)
    for keys, why in ((None, "the address names none"), (tmp_path / "mallory", f"{tmp_path}/mallory does not fit it")):
        port = engine.address.partition("?")[0].rpartition(":")[2]
        address = f"tcp://127.0.0.1:{port}" + ("" if keys is None else f"?keys={keys}")
        with pytest.raises(EngineDeadError, match=f"refused the connection, as one with keys does: {why}"):
            EngineClient(ZmqTransport(address, grace=NO_ANSWER_S / 2), hello_timeout=PATIENCE_S)
    client = connected(engine, tmp_path / "alice")
    as_engine = connected(engine, tmp_path / "keys")
    assert ask(client) == ask(as_engine)
    with pytest.raises(CallFailedError, match="only the owner"):
        client.shutdown()
    for one in (client, as_engine):
        one.close()


def test_the_list_is_read_again_and_no_stream_is_cut(engine: SupervisedEngine, tmp_path: Path) -> None:
    folder = str(tmp_path / "keys")
    alice = connected(engine, tmp_path / "alice")
    long = alice.submit([1], SamplingParams(max_tokens=60_000, ignore_eos=True), seed=0)
    add_client(folder, "bob", str(tmp_path / "bob"))
    bob = connected(engine, tmp_path / "bob")
    remove_client(folder, "alice")
    with pytest.raises(EngineDeadError, match=r"no engine answered|closed|lost"):
        connected(engine, tmp_path / "alice", NO_ANSWER_S)
    before = alice.statistics().num_generation_tokens
    while alice.statistics().num_generation_tokens < before + 100:
        time.sleep(0.01)
    alice.abort([long])
    (tmp_path / "keys" / "allowed").write_text("nonsense\n")
    again = connected(engine, tmp_path / "bob")
    assert ask(again) == ask(bob), "a wrong list changes nothing"
    for one in (alice, bob, again):
        one.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_key_is_a_tenant_with_a_quota(tmp_path: Path) -> None:
    """Over all its connections, whatever its clients say; and the engine's own keys have none."""
    folder = str(tmp_path / "keys")
    make_engine_keys(folder)
    add_client(folder, "alice", str(tmp_path / "alice"), Quota(concurrent=2))
    paced = with_options(FAKE, executor_options=fake_options(step_us=1000))  # the streams outlast the test
    long = SamplingParams(max_tokens=50_000, ignore_eos=True)
    with supervised(paced, listen=f"tcp://0.0.0.0:0?keys={folder}") as engine:
        clients = [connected(engine, tmp_path / "alice") for _ in range(2)]
        numbers = [client.submit([1], long, seed=0, tenant="bob") for client in clients]
        reads = [partial(client.read, number) for client, number in zip(clients, numbers, strict=True)]
        wait_until(lambda: all(len(read().token_ids) for read in reads))
        refused = clients[0].submit([1], long, seed=0, tenant="carol")
        wait_until(lambda: clients[0].read(refused).error is not None)
        assert "the key alice has 2 unfinished requests" in str(clients[0].read(refused).error)
        as_engine = connected(engine, tmp_path / "keys")
        ask(as_engine)
        kill(engine.process)
        wait_until(lambda: all(client.welcome.epoch == 1 for client in clients))
        lengths = [len(read().token_ids) for read in reads]
        wait_until(lambda: all(len(read().token_ids) > before for read, before in zip(reads, lengths, strict=True)))
        for client, number in zip(clients, numbers, strict=True):  # what was accepted is not refused
            client.abort([number])
            finish(client, [number])
        ask(clients[1])
        for one in (*clients, as_engine):
            one.close()


def test_streams_with_keys_outlive_their_engine(engine: SupervisedEngine, tmp_path: Path) -> None:
    client = connected(engine, tmp_path / "alice")
    expected = ask(client)
    kill(engine.process)
    assert ask(client) == expected
    assert client.welcome.epoch == 1
    client.close()
