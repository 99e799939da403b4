"""The engine process seen through its socket, and the parts of it that need a failure made to order."""

import socket as sockets
import time
from collections.abc import Iterator

import msgspec
import pytest

from frontend.engine.process import EngineProcess
from ipc.options.config import EngineConfig
from ipc.options.step_sizes import ON_CPU
from ipc.wire.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Abort,
    CallDone,
    ErrorCode,
    FinishReason,
    GetTokenizer,
    Goodbye,
    Hello,
    Outputs,
    Refused,
    RequestFailed,
    ResetPrefixCache,
    TokenizerFiles,
    Welcome,
    encode,
)
from tests.fake_options import fake_options
from tests.fake_tokens import fake_tokens
from tests.raw_client import PATIENCE_S, RawClient, request

VOCAB = 1000
CONFIG = EngineConfig(
    executor="fake", executor_options=fake_options(vocab_size=VOCAB, max_model_len=100_000), max_model_len=50_000
)
LONG = 40_000  # tokens: more than any test waits for


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with EngineProcess(CONFIG) as engine:
        yield engine


@pytest.fixture
def client(engine: EngineProcess) -> Iterator[RawClient]:
    with RawClient(engine.address) as client:
        yield client


def expected(prompt: list[int], count: int = 8) -> list[int]:
    return fake_tokens(prompt, count, VOCAB)


def check_still_right(client: RawClient, number: int = 77) -> None:
    client.add(number, [9, 8, 7])
    assert client.finish(number) == [expected([9, 8, 7])]


# --- sessions and requests ---------------------------------------------------------------------------------------


def test_welcome(client: RawClient) -> None:
    welcome = client.welcome
    assert (welcome.vocab_size, welcome.limits.max_model_len, welcome.epoch) == (VOCAB, 50_000, 0)
    assert (welcome.model_name, welcome.numerics, welcome.tokenizer_hash) == ("fake", "L2", "")
    assert len(welcome.session_token) == 16


def test_hello_again_is_the_same_session(client: RawClient) -> None:
    client.send(Hello(PROTOCOL_MAJOR, 99, "again"))
    assert client.receive(Welcome) == client.welcome  # at the lower minor


def test_two_clients_get_their_own_tokens(engine: EngineProcess, client: RawClient) -> None:
    with RawClient(engine.address) as other:
        assert other.welcome.session_token != client.welcome.session_token
        for number in range(20):
            client.add(number, [1, number], max_tokens=30)
            other.add(number, [2, number], max_tokens=30)
        assert client.finish(*range(20)) == [expected([1, number], 30) for number in range(20)]
        assert other.finish(*range(20)) == [expected([2, number], 30) for number in range(20)]


def test_other_major_is_refused_with_both_versions(engine: EngineProcess) -> None:
    with RawClient(engine.address, hello=False) as client:
        client.send(Hello(PROTOCOL_MAJOR + 1, 3, "newer"))
        refused = client.receive(Refused)
        assert (refused.code, refused.major) == (ErrorCode.VERSION_MISMATCH, PROTOCOL_MAJOR)
        assert f"protocol {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}, the client {PROTOCOL_MAJOR + 1}.3" in refused.message
        client.send(request(1, [1]))  # and no session was opened
        assert "send Hello first" in client.receive(Refused).message


def test_nothing_before_hello(engine: EngineProcess) -> None:
    with RawClient(engine.address, hello=False) as client:
        for message in (request(1, [1]), Abort(b""), Goodbye(), GetTokenizer(1), ResetPrefixCache(1)):
            client.send(message)
            assert client.receive(Refused).code == ErrorCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("prompt", "text"),
    [([], "the prompt is empty"), ([VOCAB], "not in the vocabulary"), ([1] * 50_000, "shorten it by at least 1")],
)
def test_bad_request_fails_alone(client: RawClient, prompt: list[int], text: str) -> None:
    client.add(1, [5], max_tokens=50)
    client.add(2, prompt)
    failed = client.receive(RequestFailed)
    assert (failed.number, failed.code) == (2, ErrorCode.INVALID_ARGUMENT)
    assert text in failed.message
    assert client.finish(1) == [expected([5], 50)]


def test_undecodable_parameters_fail_their_request(client: RawClient) -> None:
    fields = msgspec.msgpack.decode(encode(request(3, [1])))
    fields[3] = [1, 0.0, 0.0, 1.0, -5.0]  # temperature
    client.send(msgspec.msgpack.encode(fields))
    failed = client.receive(RequestFailed)
    assert (failed.number, failed.code) == (3, ErrorCode.INVALID_ARGUMENT)
    assert "temperature must be in [0, 10000], got -5.0" in failed.message


def test_number_in_use(client: RawClient) -> None:
    client.add(1, [5], max_tokens=LONG)
    client.add(1, [6])
    assert client.receive(RequestFailed).code == ErrorCode.ALREADY_EXISTS
    client.send(Abort((1).to_bytes(4, "little")))
    client.finish(1)
    assert client.finished == {1: FinishReason.ABORT}
    assert client.tokens[1] == expected([5], len(client.tokens[1]))


def test_calls(client: RawClient) -> None:
    client.send(GetTokenizer(5), ResetPrefixCache(6))
    assert client.receive(TokenizerFiles) == TokenizerFiles(5, "", {})
    assert client.receive(CallDone) == CallDone(6)


def test_goodbye_aborts_and_frees(engine: EngineProcess, client: RawClient) -> None:
    with RawClient(engine.address) as leaving:
        leaving.add(1, [1, 2, 3], max_tokens=LONG)
        leaving.receive(Outputs)
        leaving.send(Goodbye())
        wait_until_free(client)


def test_death_of_a_client_aborts_and_frees(engine: EngineProcess, client: RawClient) -> None:
    with RawClient(engine.address) as busy:
        for number in range(ON_CPU.num_rows):
            busy.add(number, [1, 2, 3], max_tokens=LONG)
        busy.receive(Outputs)
        dying = RawClient(engine.address)
        dying.add(1, [1, 2, 3], max_tokens=LONG)  # waits: nothing is sent to this client that could fail
        end = time.monotonic() + PATIENCE_S
        while dying.statistics().num_waiting != 1:  # statistics may be read before the others have started
            assert time.monotonic() < end
        dying.context.destroy(linger=0)  # the connection ends without a word
        while (statistics := client.statistics()).num_waiting:
            assert time.monotonic() < end
        assert statistics.num_running == ON_CPU.num_rows
    wait_until_free(client)


def test_death_of_a_client_while_it_is_served(engine: EngineProcess, client: RawClient) -> None:
    dying = RawClient(engine.address)
    for number in range(ON_CPU.num_rows + 8):
        dying.add(number, [1, 2, 3], max_tokens=LONG)
    dying.receive(Outputs)
    dying.context.destroy(linger=0)
    wait_until_free(client)
    check_still_right(client)


def wait_until_free(client: RawClient) -> None:
    """The disconnect is an event, not a timeout: on a quiet machine this takes a statistics call."""
    end = time.monotonic() + PATIENCE_S
    while (statistics := client.statistics()).num_running + statistics.num_waiting:
        assert time.monotonic() < end, statistics
    assert statistics.num_free_blocks == statistics.num_blocks - 1


# --- garbage -----------------------------------------------------------------------------------------------------


def test_garbage_frames_are_answered_and_the_witness_stays_right(engine: EngineProcess, client: RawClient) -> None:
    client.add(1, [4, 2], max_tokens=2000)
    good = encode(request(1, [1]))
    frames = [b"", b"\xff" * 50, b"\xdd\xff\xff\xff\xff", b"\x91" * 100_000, good[:-1], b"\x92\x02\xd9\x02\xff\xff"]
    frames += [msgspec.msgpack.encode([tag]) for tag in (0, 2, 3, 64, 66, 96, 111, 2**40)]
    for some in (frames[:7], frames[7:]):  # ten in a row would end the session
        check_answers(engine, client, some)
    assert client.finish(1) == [expected([4, 2], 2000)]


def check_answers(engine: EngineProcess, client: RawClient, frames: list[bytes]) -> None:
    with RawClient(engine.address) as hostile:
        for frame in frames:
            hostile.send(frame)
            answer = hostile.receive_any()
            assert isinstance(answer, (Refused, RequestFailed)), answer
            assert answer.code == ErrorCode.INVALID_ARGUMENT
        hostile.socket.send_multipart([b"two", b"frames"])
        assert hostile.receive(Refused).message == "a message must be one frame, this one has 2"
        hostile.socket.send_multipart([b"x"] * 3000)
        assert "this one has 3000" in hostile.receive(Refused).message
        check_still_right(hostile)


def test_bytes_that_are_no_zeromq(engine: EngineProcess, client: RawClient) -> None:
    path = engine.address.removeprefix("ipc://")
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x01\x00", b"\x00" * 1000, b""):
        with sockets.socket(sockets.AF_UNIX) as raw:
            raw.connect(path)
            raw.sendall(data)
    check_still_right(client)


def test_idle_engine_sleeps(engine: EngineProcess, client: RawClient) -> None:
    def cpu_seconds() -> float:
        with open(f"/proc/{engine.pid}/schedstat") as file:  # of the main thread
            return int(file.read().split()[0]) / 1e9

    check_still_right(client)
    before = cpu_seconds()
    time.sleep(0.3)
    assert cpu_seconds() - before < 0.003
