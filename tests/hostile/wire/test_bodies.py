"""Bodies that hostile peers send: unfinished, hoarded, left, slow, and ones that would get two answers."""

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from uvicorn.server import ServerState

from frontend.http.wire import protocol as protocol_module
from frontend.http.wire.held_bodies import HeldBodies, HeldBody
from tests.frontend.http.caller import serving, wait_for
from tests.frontend.http.peer import App, connected, status, turning

HEAD = b"POST /x HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n"


@pytest.fixture(autouse=True)
def loop() -> Iterator[None]:
    with turning():
        yield


def test_hoarded_bodies_give_way_to_those_that_come() -> None:
    """Of unfinished bodies the one that was silent for the longest time is refused; the others are whole."""
    bodies, app, state = HeldBodies(10_100), App(), ServerState()
    hoards = [connected(app, state, bodies=bodies) for _ in range(3)]
    for peer, _ in hoards:
        peer.data_received(HEAD % 4000 + b"x" * 3000)
    hoards[0][0].data_received(b"x")  # so the second is the one that is silent
    honest, answered = connected(app, state, bodies=bodies)
    honest.data_received(HEAD % 4000 + b"x" * 4000)
    assert [status(transport) for _, transport in hoards] == [0, 503, 0]
    assert b"retry-after: 1\r\n" in hoards[1][1].written
    assert [len(b"".join(request.parts)) for request in app.requests] == [4000]
    assert bodies.num_bytes == 3001 + 3000 + 4000
    app.requests[0].exchange.write_whole(200, [], b"")
    assert status(answered) == 200
    assert bodies.num_bytes == 3001 + 3000


def test_complete_bodies_are_not_dropped_for_others() -> None:
    """What waits to be read has been promised an answer; who comes then is refused, by name."""
    bodies, app, state = HeldBodies(6000), App(), ServerState()
    for _ in range(2):
        peer, _ = connected(app, state, bodies=bodies)
        peer.data_received(HEAD % 3000 + b"x" * 3000)
    late, refused = connected(app, state, bodies=bodies)
    late.data_received(HEAD % 10 + b"x" * 9)
    assert (status(refused), len(app.requests), bodies.num_bytes) == (503, 2, 6000)
    assert b"the server's limit" in refused.written


@pytest.mark.parametrize("waits", [0, 1])
def test_what_a_peer_sent_is_dropped_when_it_leaves(waits: int) -> None:
    """At once, without a collection of cycles; also the body of a request that waits behind another one's answer."""
    bodies, app = HeldBodies(1 << 20), App()
    peer, transport = connected(app, bodies=bodies)
    peer.data_received(b"GET /1 HTTP/1.1\r\nhost: h\r\n\r\n" * waits + HEAD % 5000 + b"x" * 3000)
    protocol, parts = weakref.ref(peer.protocol), weakref.ref(peer.protocol.cycle)
    assert bodies.num_bytes == 3000
    gc.disable()
    try:
        transport.calls.append("abort")
        peer.connection_lost(None)
        assert bodies.num_bytes == 0
        app.requests.clear()
        del peer, transport
        assert (protocol(), parts()) == (None, None)
    finally:
        gc.enable()


@pytest.mark.parametrize("head", [b"x: 1\r\n" * 200, b"content-length: 6000\r\n\r\n"])
def test_a_refused_connection_is_gone_when_it_ends(head: bytes) -> None:
    """At once, too: the error of what the peer sent has a traceback, which has the connection and the data."""
    peer, transport = connected(App())
    peer.data_received(b"POST /x HTTP/1.1\r\nhost: h\r\n" + head)
    assert status(transport) in (413, 431)
    protocol = weakref.ref(peer.protocol)
    gc.disable()
    try:
        transport.calls.append("abort")
        peer.connection_lost(None)
        del peer, transport
        assert protocol() is None
    finally:
        gc.enable()


def test_a_body_that_stops_is_refused_however_much_of_it_came() -> None:
    """The rate was one since the beginning: 4,000 bytes of five million bought an hour of silence."""
    app = App()
    peer, transport = connected(app)
    peer.data_received(HEAD % 5000 + b"x" * 100)
    for index in range(20):
        peer.data_received(b"x" * 200)
        peer.sweep(time.monotonic())
        assert status(transport) == 0, index
    peer.sweep(time.monotonic() + 13)
    assert status(transport) == 0
    peer.sweep(time.monotonic() + 16)
    assert (status(transport), transport.calls) == (408, ["write_eof"])


def test_a_request_that_was_answered_gets_no_second_answer() -> None:
    """A proxy may give the second to somebody else."""
    for rest in (b"1400\r\n" + b"x" * 5120, b"rubbish"):
        peer, transport = connected(App(refused=("/no",)))
        peer.data_received(b"POST /no HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
        assert status(transport) == 404
        peer.data_received(rest)
        assert (transport.written.count(b"HTTP/1.1 "), transport.calls) == (1, ["write_eof"])
    peer, transport = connected(App(refused=("/no",)))
    peer.data_received(b"POST /no HTTP/1.1\r\nhost: h\r\ncontent-length: 4000\r\n\r\n")
    peer.sweep(time.monotonic() + 30)
    assert (transport.written.count(b"HTTP/1.1 "), transport.calls) == (1, ["write_eof"])


class Timers:
    """The part of a loop that sets timers; a test lets them run out."""

    def __init__(self) -> None:
        self.due = list[Callable[[], None]]()

    def call_later(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        assert seconds > 0
        self.due.append(partial(call, *arguments))


def test_bodies_of_refused_requests_are_read_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read at once, 7 MB bodies of a key out of quota made others wait for 40 times as long."""
    monkeypatch.setattr(protocol_module, "_DROPPED_AT_ONCE", 1000)
    bodies, timers, app, state = HeldBodies(1 << 20), Timers(), App(refused=("/x",)), ServerState()
    put = bodies.drops.put
    monkeypatch.setattr(bodies.drops, "put", lambda read_on, loop: put(read_on, timers))  # type: ignore[arg-type]
    peers = [connected(app, state, bodies=bodies) for _ in range(4)]
    for peer, transport in peers:
        peer.data_received(HEAD % 4000)
        peer.data_received(b"x" * 900)
        assert (status(transport), transport.calls) == (404, [])
        peer.data_received(b"x" * 900)
        assert transport.calls == ["pause_reading"]
        peer.sweep(time.monotonic() + 30)  # it is not the peer that is slow
    assert bodies.num_bytes == 0
    peers[1][1].calls.append("abort")
    peers[1][0].connection_lost(None)
    for turn in range(4):
        assert len(timers.due) == 1
        timers.due.pop()()
        assert [transport.calls[-1] == "resume_reading" for _, transport in peers] == [
            index <= turn and index != 1 for index in range(4)
        ]
    assert timers.due == []
    peer, transport = peers[0]
    peer.data_received(b"x" * 2200 + HEAD % 0)
    assert transport.written.count(b"HTTP/1.1 404") == 2  # the connection goes on


def test_what_comes_behind_a_refusal_is_read_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection closes, and its peer may still read why."""
    monkeypatch.setattr(protocol_module, "_DROPPED_AT_ONCE", 1000)
    peer, transport = connected(App())
    peer.data_received(HEAD % 6000)
    assert (status(transport), transport.calls) == (413, ["write_eof"])
    peer.data_received(b"x" * 1500)
    assert transport.calls == ["write_eof", "pause_reading"]
    peer.sweep(time.monotonic() + 3)
    assert transport.calls[-1] == "abort"


@pytest.mark.parametrize("ends", [True, False])
def test_a_refused_body_leaves_no_bytes_counted(ends: bool) -> None:
    bodies, app = HeldBodies(1 << 20), App()
    peer, _ = connected(app, bodies=bodies)
    peer.data_received(HEAD % 5000 + b"x" * 100)
    if ends:
        peer.sweep(time.monotonic() + 30)
    else:
        peer.data_received(b"x" * 4900)
        app.requests[0].exchange.write_whole(200, [], b"")
    assert (bodies.num_bytes, bodies.unfinished) == (0, {})


def test_heads_are_counted_until_they_are_complete() -> None:
    bodies, app, state = HeldBodies(1000), App(), ServerState()
    silent, refused = connected(app, state, bodies=bodies)
    silent.data_received(b"GET / HTTP/1.1\r\nx: " + b"x" * 600)
    other, answered = connected(app, state, bodies=bodies)
    other.data_received(b"GET / HTTP/1.1\r\nx: " + b"x" * 600)
    assert (status(refused), status(answered)) == (503, 0)
    other.data_received(b"\r\nhost: h\r\n\r\n")
    assert (len(app.requests), bodies.num_bytes, bodies.unfinished) == (1, 0, {})
    left, transport = connected(app, state, bodies=bodies)
    left.data_received(b"GET / HTTP/1.1\r\nx: ")
    transport.calls.append("abort")
    left.connection_lost(None)
    assert (bodies.num_bytes, bodies.unfinished) == (0, {})


def test_bytes_are_counted_once() -> None:
    bodies = HeldBodies(10)
    one = HeldBody(bodies, lambda error: None)
    one.add(6)
    one.release()
    one.release()
    assert bodies.num_bytes == 0


@pytest.mark.parametrize("num_peers", [20, pytest.param(150, marks=[pytest.mark.soak])])
def test_hoarders_do_not_swell_the_process(num_peers: int) -> None:
    """Bodies of 8 MB without their last byte, by peers that then leave: the process stays as large as its bound."""
    with serving("--executor", "fake", "--executor-option", "vocab_size=1000", "--access-log") as caller:
        pid, before = _http_pid(caller.process.pid), 0
        before = _rss_mib(pid)
        peers = []
        size = 8_000_000
        head = HEAD.replace(b"/x", b"/tokenize").replace(b"host: h", b"host: localhost")
        try:
            for _ in range(num_peers):
                peers.append(caller.socket())
                peers[-1].sendall(head % size + b" " * (size - 1))
            assert caller.complete([5, 6], max_tokens=3).status == 200
            assert _rss_mib(pid) - before < 128 + 64
        finally:
            for peer in peers:
                peer.close()
        wait_for(lambda: _rss_mib(pid) - before < 64)


def _http_pid(owner: int) -> int:
    """The process id of the HTTP process of `engine-core serve`."""
    with open(f"/proc/{owner}/task/{owner}/children") as file:
        children = file.read().split()
    for child in children:
        with open(f"/proc/{child}/cmdline") as file:
            if "frontend.http" in file.read():
                return int(child)
    raise AssertionError(children)


def _rss_mib(pid: int) -> float:
    with open(f"/proc/{pid}/status") as file:
        line = next(line for line in file if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024
