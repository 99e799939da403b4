"""Connections: what breaks a bound is refused at once, who leaves frees the engine, and others are never harmed."""

import random
import struct
import threading
from socket import SO_LINGER, SOL_SOCKET

import pytest

from frontend.http.wire.protocol import MAX_PIPELINED
from frontend.llm import LLM
from ipc.params.sampling_params import SamplingParams
from tests.frontend.http.caller import Caller, free_blocks, post_bytes, wait_for

BODY = b'{"prompt": "One", "max_tokens": 8, "temperature": 0}'
LONG = b'{"prompt": "One", "max_tokens": 4000, "temperature": 0, "ignore_eos": true, "stream": true}'


def status_of(answer: bytes) -> int:
    return int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0


def test_a_request_in_pieces_and_two_in_one(served: Caller) -> None:
    request = post_bytes("/v1/completions", BODY)
    with served.socket() as peer:
        for at in range(0, len(request), 7):
            peer.sendall(request[at : at + 7])
        assert b"200 OK" in peer.recv(4096)
    both = served.raw(request + post_bytes("/tokenize", b'{"prompt": "x"}', b"connection: close"))
    assert both.count(b"HTTP/1.1 200") == 2
    assert both.index(b"text_completion") < both.index(b"max_model_len")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * (1 << 20), 431),
        (b"GET / HTTP/1.1\r\n" + b"".join(b"a%d: b\r\n" % i for i in range(200)) + b"\r\n", 431),
        (post_bytes("/v1/completions", b"", b"x: y").replace(b"content-length: 0", b"content-length: 99999999"), 413),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\ncontent-length: 5\r\n\r\nabcde", 400),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n"
            b"0\r\n\r\nGET /v1/models HTTP/1.1\r\n\r\n",
            400,
        ),
        (b"POST /v1/completions HTTP/1.1\r\nhost : x\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    ],
)
def test_what_breaks_a_bound(served: Caller, request_bytes: bytes, status: int) -> None:
    answer = served.raw(request_bytes)
    assert status_of(answer) == status, answer[:200]
    assert answer.count(b"\r\n\r\n") == 1  # nothing behind it was taken for a request
    assert b'{"error":{"message":' in answer
    assert b"connection: close" in answer


def test_a_chunked_body_has_its_bound_too(served: Caller) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    small = b'{"prompt": "x"}'
    assert status_of(served.raw(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(small), small))) == 200
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    with served.socket() as peer:
        peer.sendall(head)
        try:
            for _ in range(10):
                peer.sendall(chunk)
        except ConnectionError:
            return
        assert b"413" in peer.recv(4096)


def test_a_pipeline_has_its_bound(served: Caller) -> None:
    """What came before the bound is answered, in order; what broke it is refused, and the rest is not read."""
    answer = served.raw(
        post_bytes("/tokenize", b'{"prompt": "x"}') + b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n" * 100
    )
    assert answer.count(b"HTTP/1.1 200 ") == 1 + MAX_PIPELINED
    assert answer.count(b"HTTP/1.1 400 ") == 1
    assert (
        answer.index(b"max_model_len") < answer.index(b"content-length: 0") < answer.index(b"wait on this connection")
    )


@pytest.mark.parametrize("count", [60, pytest.param(400, marks=[pytest.mark.soak])])
def test_who_leaves_frees_the_engine(served: Caller, llm: LLM, count: int) -> None:
    """Clients leave at random bytes of a request or an answer; a witness's streams stay right."""
    rng, before = random.Random(5), free_blocks(llm)
    wanted = llm.generate("Witness", SamplingParams(max_tokens=50, temperature=0), use_tqdm=False)[0].outputs[0].text
    request = post_bytes("/v1/completions", LONG)
    for index in range(count):
        with served.socket() as peer:
            peer.sendall(request[: rng.choice((len(request), rng.randrange(1, len(request))))])
            left = rng.randrange(4000)
            peer.settimeout(0.02)
            try:
                while left > 0 and (part := peer.recv(min(left, 4096))):
                    left -= len(part)
            except TimeoutError:
                pass
            if rng.random() < 0.5:
                peer.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))  # a reset instead of an end
        if index % 20 == 0:
            answer = served.complete("Witness", max_tokens=50, temperature=0)
            assert answer.json["choices"][0]["text"] == wanted
    wait_for(lambda: llm.statistics().num_running + llm.statistics().num_waiting == 0)
    llm.reset_prefix_cache()
    assert free_blocks(llm) >= before


def test_who_does_not_wait_for_a_whole_answer_frees_the_engine(served: Caller, llm: LLM) -> None:
    """Its tokens are counted: how long it takes depends on the machine."""
    body = b'{"prompt": "One", "max_tokens": 4000, "temperature": 1, "n": 64, "ignore_eos": true}'
    before = llm.statistics().num_generation_tokens
    with served.socket() as peer:
        peer.sendall(post_bytes("/v1/completions", body))
        wait_for(lambda: llm.statistics().num_running == 64)
    wait_for(lambda: llm.statistics().num_running == 0)
    assert 0 < llm.statistics().num_generation_tokens - before < 64 * 4000


def test_who_does_not_read_holds_up_nobody(served: Caller, llm: LLM) -> None:
    """A reader that stops gets its whole text later; its tokens wait in the journal."""
    wanted = llm.generate("One", SamplingParams(max_tokens=4000, temperature=0, ignore_eos=True), use_tqdm=False)
    stalled = [served.socket() for _ in range(4)]
    try:
        for peer in stalled:
            peer.sendall(post_bytes("/v1/completions", LONG))
        answer = served.complete("Witness", max_tokens=50, temperature=0)
        assert answer.status == 200
        wait_for(lambda: llm.statistics().num_running + llm.statistics().num_waiting == 0)  # and the connection full
        text = _read_text(stalled[0])
        assert text == wanted[0].outputs[0].text
    finally:
        for peer in stalled:
            peer.close()


def _read_text(peer) -> str:
    import json

    data = b""
    while b"data: [DONE]" not in data[-100:]:
        part = peer.recv(1 << 20)
        assert part, data[-300:]
        data += part
    chunks = data.split(b"\r\n\r\n", 1)[1]
    body = b""
    while chunks:
        size, _, chunks = chunks.partition(b"\r\n")
        body, chunks = body + chunks[: int(size, 16)], chunks[int(size, 16) + 2 :]
        if size == b"0":
            break
    events = [json.loads(line[6:]) for line in body.split(b"\n\n") if line.startswith(b"data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


def test_many_streams_at_once_are_right(served: Caller, llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, temperature=0)
    prompts = [f"Prompt {i}" for i in range(24)]
    wanted = [one.outputs[0].text for one in llm.generate(prompts, params, use_tqdm=False)]
    found: dict[int, str] = {}

    def ask(index: int) -> None:
        events = served.complete(prompts[index], max_tokens=30, temperature=0, stream=True).events
        found[index] = "".join(event["choices"][0]["text"] for event in events)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(prompts))] == wanted


@pytest.mark.parametrize("count", [1500, pytest.param(100_000, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])])
def test_mutated_requests(served: Caller, llm: LLM, count: int) -> None:
    rng = random.Random(11)
    seeds = [post_bytes("/v1/completions", BODY), post_bytes("/tokenize", b'{"prompt": "x y z"}')]
    wanted = served.complete("Witness", max_tokens=20, temperature=0).json["choices"][0]["text"]
    for index in range(count):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(data))
            kind = rng.randrange(4)
            if kind == 0:
                data[at] = rng.randrange(256)
            elif kind == 1:
                del data[at : at + rng.randrange(1, 9)]
            elif kind == 2:
                data[at:at] = rng.choice((b"\r\n", b"\x00", b"{", b'"', b"[[[[", b": ", b"9" * 12, b"%00"))
            else:
                data[at:at] = data[: rng.randrange(20)]
        with served.socket() as peer:
            try:
                peer.sendall(data)
                peer.shutdown(1)
                peer.settimeout(5 if index % 50 == 0 else 0.001)
                answer = peer.recv(4096)
            except (TimeoutError, ConnectionError):
                continue
            assert not answer or answer.startswith((b"HTTP/1.1 ", b"HTTP/1.0 ")), (bytes(data), answer)
            assert b" 500 " not in answer[:20], (bytes(data), answer)
        if index % 250 == 0:
            assert served.complete("Witness", max_tokens=20, temperature=0).json["choices"][0]["text"] == wanted
    wait_for(lambda: llm.statistics().num_running + llm.statistics().num_waiting == 0)
