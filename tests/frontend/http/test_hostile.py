"""Peers that mean harm: smuggled requests, connections by the thousand, and engines that are killed under streams."""

import contextlib
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from frontend.llm import LLM
from ipc.errors import CallFailedError
from ipc.params.sampling_params import SamplingParams
from tests.frontend.http.caller import Caller, post_bytes, serving, wait_for

BODY = b'{"prompt": "One", "max_tokens": 8, "temperature": 0}'
HIDDEN = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize(
    "fields",
    [
        b"content-length: 6\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 6\r\n\r\n0\r\n\r\n",
        b"content-length: 4\r\ncontent-length: 4\r\n\r\n{}  ",
        b"content-length: 4, 4\r\n\r\n{}  ",
        b"content-length: +4\r\n\r\n{}  ",
        b"content-length: -1\r\n\r\n",
        b"content-length: 0x4\r\n\r\n{}  ",
        b"content-length: 99999999999999999999999\r\n\r\n",
        b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n-1\r\n",
        b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        b"transfer-encoding: chunked\r\n\r\n3 \rx\n{}\r\n0\r\n\r\n",
        b"x: a\r\n b\r\ncontent-length: 0\r\n\r\n",  # a folded line
        b"x: a\x00b\r\ncontent-length: 0\r\n\r\n",
        b"x y: a\r\ncontent-length: 0\r\n\r\n",
        b": a\r\ncontent-length: 0\r\n\r\n",
        b"content-length: 0\n\n",  # lines that end in a line feed alone
        b"content-length: 0\r\rx: y\r\n\r\n",
    ],
)
def test_no_request_hides_in_another(served: Caller, fields: bytes) -> None:
    """Two readings of a length are one answer, 400, and the connection's end."""
    answer = served.raw(POST + fields + HIDDEN)
    assert answer.startswith(b"HTTP/1.1 4"), (fields, answer[:300])
    assert b'"object":"list"' not in answer, answer
    assert answer.count(b"HTTP/1.1 4") == 1
    assert b"connection: close" in answer


def test_http_1_0(served: Caller) -> None:
    """No chunks: a stream ends with the connection. A whole answer may keep it."""
    head = b"POST /v1/completions HTTP/1.0\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    stream = BODY.replace(b"}", b', "stream": true}')
    answer = served.raw(head + b"content-length: %d\r\n\r\n" % len(stream) + stream)
    top, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in top
    assert b"connection: close" in top
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")
    both = head + b"connection: keep-alive\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
    answer = served.raw(both + b"GET /live HTTP/1.0\r\nhost: localhost\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert answer.count(b"connection: keep-alive") == 1


def test_truncated_requests_take_nothing(served: Caller, llm: LLM) -> None:
    request = post_bytes("/v1/completions", BODY.replace(b"8", b"4000"))
    for end in range(1, len(request), 9):
        with served.socket() as peer:
            peer.sendall(request[:end])
    assert served.complete("Witness", max_tokens=2).status == 200
    wait_for(lambda: llm.statistics().num_running + llm.statistics().num_waiting == 0)


def test_a_request_cut_in_two_anywhere(served: Caller) -> None:
    request = post_bytes("/tokenize", b'{"prompt": "x y"}')
    wanted = served.post("/tokenize", {"prompt": "x y"}).body
    with served.socket() as peer:
        for at in range(1, len(request), 3):
            peer.sendall(request[:at])
            time.sleep(0.0005)
            peer.sendall(request[at:])
            answer = b""
            while not answer.endswith(wanted):
                part = peer.recv(4096)
                assert part, answer
                answer += part


@contextlib.contextmanager
def open_files(count: int) -> Iterator[None]:
    """Raise this process's limit of open files, where that is allowed; else the test is skipped."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        pytest.skip(f"{hard} open files are allowed; {count} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(300)])])
def test_connections_by_the_thousand(served: Caller, count: int) -> None:
    """Idle ones, and ones in the middle of a head: a witness is served as ever, and then each of them."""
    wanted = served.complete("Witness", max_tokens=20, temperature=0).json["choices"][0]["text"]
    with open_files(count + 500), contextlib.ExitStack() as peers:
        sockets = []
        for index in range(count):
            sockets.append(peers.enter_context(served.socket()))
            if index % 2:
                sockets[-1].sendall(b"GET /live HTTP/1.1\r\nho")
            if index % 100 == 0:
                text = served.complete("Witness", max_tokens=20, temperature=0).json["choices"][0]["text"]
                assert text == wanted
        for peer in sockets[:: max(1, count // 200)]:
            with contextlib.suppress(ConnectionError):  # a head that took more than 10 s
                peer.sendall(
                    b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n" if peer is sockets[0] else b"st: localhost\r\n\r\n"
                )
        begin = time.perf_counter()
        assert served.get("/health").status == 200
        assert time.perf_counter() - begin < 2
    wait_for(lambda: served.get("/v1/load").status == 200)


def test_more_connections_than_allowed() -> None:
    with serving("--executor", "fake", "--max-connections", "20") as caller, contextlib.ExitStack() as peers:
        kept = [peers.enter_context(caller.socket()) for _ in range(20)]
        kept[0].sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert kept[0].recv(4096).startswith(b"HTTP/1.1 200 ")
        assert b"its limit" in caller.raw(b"")
        kept.pop().close()
        wait_for(lambda: caller.raw(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n").startswith(b"HTTP/1.1 200 "))


def _num_running(llm: LLM) -> int:
    """Running requests; -1 while the engine is away."""
    try:
        return llm.statistics().num_running
    except CallFailedError:
        return -1


@pytest.mark.parametrize(
    ("num_streams", "num_kills"),
    [(8, 1), pytest.param(64, 10, marks=[pytest.mark.soak, pytest.mark.timeout(300)])],
)
def test_a_killed_engine_is_a_pause(num_streams: int, num_kills: int) -> None:
    """Of streams over HTTP no token is lost, doubled or different, and no connection is cut."""
    options = (
        "--executor",
        "fake",
        "--executor-option",
        "vocab_size=1000",
        "--max-num-seqs",
        "64",
        "--executor-option",
        "step_us=3000",
    )
    length = 300 * num_kills
    with serving(*options, "--restarts", "100", "--executor-option", "max_model_len=4096") as caller:
        prompts = [[7, 9, index] for index in range(num_streams)]
        params = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True)
        with LLM(connect=caller.connect) as llm:
            outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
            wanted = [one.outputs[0].token_ids for one in outputs]
            found: dict[int, list[int]] = {}

            def ask(index: int) -> None:
                fields = {"max_tokens": length, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
                events = caller.complete(prompts[index], stream=True, **fields).events
                assert not any("error" in event for event in events), events[-1]
                found[index] = [token for event in events for token in event["choices"][0]["token_ids"]]

            threads = [threading.Thread(target=ask, args=(index,)) for index in range(num_streams)]
            for thread in threads:
                thread.start()
            for _ in range(num_kills):
                wait_for(lambda: _num_running(llm) == num_streams)
                time.sleep(0.1)
                os.kill(llm.client.welcome.pid, signal.SIGKILL)
                time.sleep(0.5)
            for thread in threads:
                thread.join()
        assert [found.get(index) for index in range(num_streams)] == wanted


def test_a_peer_that_resets(served: Caller, llm: LLM) -> None:
    """A reset in the middle of a stream ends its request at once."""
    peer = served.socket()
    peer.sendall(post_bytes("/v1/completions", BODY.replace(b"8", b"4000").replace(b"}", b', "stream": true}')))
    assert peer.recv(100)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    peer.close()
    wait_for(lambda: llm.statistics().num_running == 0, 2.0)
