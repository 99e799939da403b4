"""The framing of answers for each kind of peer, and what leaves the server when."""

import random
import time
from collections.abc import Iterator

import pytest

from frontend.http.errors import Headers
from frontend.http.wire.exchange import PIECE_BYTES, Exchange
from frontend.http.wire.held_bodies import HeldBodies
from frontend.http.wire.protocol import IDLE_S
from frontend.http.wire.unread_answers import UnreadAnswers
from tests.frontend.http.peer import App, Peer, Transport, connected, spin, turning

FIELDS: Headers = [(b"content-type", b"text/plain")]


@pytest.fixture(autouse=True)
def loop() -> Iterator[None]:
    with turning():
        yield


def asked(head: bytes = b"GET /x HTTP/1.1\r\nhost: h\r\n") -> tuple[Exchange, Peer, Transport]:
    """A request that has come, and its connection."""
    app = App()
    peer, transport = connected(app)
    peer.data_received(head + b"\r\n")
    return app.requests[0].exchange, peer, transport


def test_a_stream_is_chunked() -> None:
    one, _, transport = asked()
    one.begin(FIELDS)
    one.write(b"data: 1\n\n")
    one.write(b"")
    one.write(b"x" * 17)
    one.end(b"end")
    head, _, body = transport.written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"transfer-encoding: chunked" in head
    assert body == b"9\r\ndata: 1\n\n\r\n" + b"11\r\n" + b"x" * 17 + b"\r\n" + b"3\r\nend\r\n0\r\n\r\n"


def test_a_stream_of_http_1_0_ends_with_the_connection() -> None:
    one, _, transport = asked(b"GET /x HTTP/1.0\r\nconnection: keep-alive\r\n")
    one.begin(FIELDS)
    one.write(b"a\n\n")
    one.end(b"b")
    spin()
    head, _, body = transport.written.partition(b"\r\n\r\n")
    assert (body, transport.calls) == (b"a\n\nb", ["close"])
    assert b"connection: close" in head
    assert b"chunked" not in head


@pytest.mark.parametrize("is_http_1_0", [False, True])
@pytest.mark.parametrize("keep_alive", [False, True])
def test_a_whole_answer(is_http_1_0: bool, keep_alive: bool) -> None:
    version, connection = b"1.0" if is_http_1_0 else b"1.1", b"keep-alive" if keep_alive else b"close"
    one, _, transport = asked(b"GET /x HTTP/%b\r\nhost: h\r\nconnection: %b\r\n" % (version, connection))
    one.write_whole(404, FIELDS, b"gone")
    head, _, body = transport.written.partition(b"\r\n\r\n")
    assert (body, b"content-length: 4" in head) == (b"gone", True)
    assert (b"connection: close" in head) is not keep_alive
    assert (b"connection: keep-alive" in head) is (keep_alive and is_http_1_0)
    assert transport.calls == ([] if keep_alive else ["close"])


def test_an_answer_to_head_has_no_body() -> None:
    one, _, transport = asked(b"HEAD /x HTTP/1.1\r\nhost: h\r\n")
    one.write_whole(200, FIELDS, b"body")
    assert transport.written.endswith(b"content-length: 4\r\n\r\n")
    one, _, transport = asked(b"HEAD /x HTTP/1.1\r\nhost: h\r\n")
    one.begin(FIELDS)
    one.write(b"part")
    one.end(b"end")
    assert transport.written.endswith(b"\r\n\r\n")
    assert b"part" not in transport.written


def test_nothing_is_written_to_a_peer_that_left() -> None:
    told = list[str]()
    one, peer, transport = asked()
    one.on_left = lambda: told.append("left")
    one.begin(FIELDS)
    before = transport.written
    transport.calls.append("abort")  # its end
    peer.connection_lost(None)
    one.write(b"x")
    one.end(b"y")
    one.write_whole(200, FIELDS, b"z")
    assert (transport.written, told) == (before, ["left"])


def test_what_is_written_to_a_full_connection_is_sent_later() -> None:
    """A reply may end while its peer does not read."""
    told = list[str]()
    one, peer, transport = asked()
    one.begin(FIELDS)
    assert not one.write(b"1")
    peer.pause_writing()
    assert one.write(b"2")
    one.end(b"3")
    assert transport.written.endswith(b"\r\n1\r\n1\r\n")
    one.on_writable = lambda: told.append("again")
    peer.resume_writing()
    assert transport.written.endswith(b"1\r\n1\r\n" + b"1\r\n2\r\n" + b"1\r\n3\r\n0\r\n\r\n")
    assert told == ["again"]


@pytest.mark.parametrize("kind", ["whole", "end", "part"])
def test_a_long_answer_waits_for_its_reader(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 MB in one piece would take a turn of the loop of 20 ms."""
    one, peer, transport = asked()
    protocol = peer.protocol
    write, sizes = transport.write, list[int]()

    def take(data: bytes) -> None:
        write(data)
        sizes.append(len(data))
        if len(data) >= PIECE_BYTES:
            protocol.pause_writing()

    monkeypatch.setattr(transport, "write", take)
    protocol.uncork()  # looks at the transport again
    body = random.Random(1).randbytes(2 * PIECE_BYTES + 5)
    is_whole = kind == "whole"
    if is_whole:
        one.write_whole(200, FIELDS, body)
    else:
        one.begin(FIELDS)
        if kind == "end":
            one.end(body)
        else:
            assert one.write(body)  # the connection is full
    for num_pieces in (1, 2):
        assert sum(sizes) // PIECE_BYTES == num_pieces
        peer.resume_writing()
    assert body[-5:] in transport.written
    assert not is_whole or transport.written.partition(b"\r\n\r\n")[2] == body
    assert max(sizes) < PIECE_BYTES + 500


@pytest.mark.parametrize("leaves", [False, True])
def test_who_sends_a_long_answer_waits_until_it_is_sent(leaves: bool) -> None:
    """Otherwise the request ends with its answer in parts, and the server closes the connection behind the first."""
    app, bodies = App(), HeldBodies(1 << 20)
    peer, transport = connected(app, bodies=bodies)
    peer.data_received(b"GET /x HTTP/1.1\r\nhost: h\r\n\r\n")
    peer.pause_writing()
    one, body = app.requests[0].exchange, random.Random(1).randbytes(2 * PIECE_BYTES + 5)
    sending = Peer.runner.get_loop().create_task(one.send_whole(200, FIELDS, body))
    spin()
    assert not sending.done()
    assert bodies.unread.num_bytes == len(body)
    if leaves:
        transport.calls.append("abort")
        peer.connection_lost(None)
    else:
        peer.resume_writing()
        assert transport.written.endswith(body)
    assert sending.done()
    assert bodies.unread.num_bytes == 0


def test_unread_answers_give_way_to_others() -> None:
    """Of answers that wait for their peers, the one whose peer has read nothing for the longest time is dropped."""
    bodies = HeldBodies(1 << 20)
    bodies.unread = UnreadAnswers(250)
    exchanges, transports, peers = list[Exchange](), list[Transport](), list[Peer]()

    def wait_for_reader(num_bytes: int) -> None:
        app = App()
        peer, transport = connected(app, bodies=bodies)
        peer.data_received(b"GET /x HTTP/1.1\r\nhost: h\r\n\r\n")
        peer.pause_writing()
        app.requests[0].exchange.write_whole(200, FIELDS, b"x" * num_bytes)
        exchanges.append(app.requests[0].exchange)
        transports.append(transport)
        peers.append(peer)

    for num_bytes in (100, 100, 40):
        wait_for_reader(num_bytes)
    exchanges[0].resume()  # its connection took a part
    wait_for_reader(100)
    assert ["abort" in transport.calls for transport in transports] == [False, True, False, False]
    assert bodies.unread.num_bytes == 240
    wait_for_reader(1000)  # alone
    assert ["abort" in transport.calls for transport in transports] == [True, True, True, True, False]
    peers[4].resume_writing()
    assert bodies.unread.num_bytes == 0
    for peer in peers[:4]:
        peer.connection_lost(None)


def test_a_peer_that_does_not_read_the_rest_of_an_answer_is_cut_off() -> None:
    one, peer, transport = asked()
    peer.pause_writing()
    one.write_whole(200, FIELDS, b"rest")
    peer.sweep(time.monotonic() + IDLE_S - 5)
    assert "abort" not in transport.calls
    peer.sweep(time.monotonic() + IDLE_S + 5)
    assert "abort" in transport.calls
    peer.connection_lost(None)


def test_no_field_can_end_its_line() -> None:
    one, _, transport = asked()
    with pytest.raises(RuntimeError, match="Invalid HTTP header value"):
        one.write_whole(200, [(b"x", b"1\r\ny: 2")], b"")
    assert transport.written == b""


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_head_leaves_with_what_follows_it(is_whole: bool) -> None:
    """As one send(): each of them is a system call, and wakes the peer."""
    one, peer, transport = asked()
    if is_whole:
        one.write_whole(200, FIELDS, b"body")
    else:
        one.begin(FIELDS)
        assert transport.num_writes == 0
        one.write(b"part")
    assert transport.num_writes == 1
    if not is_whole:
        one.end(b"end")
    spin()
    assert peer.protocol.timeout_keep_alive_task is None  # a sweep ends what is idle: no timer for each answer


def test_a_head_alone_leaves_too() -> None:
    one, _, transport = asked()
    one.begin(FIELDS)
    one.write(b"")
    assert transport.written.endswith(b"\r\n\r\n")
    one.write(b"part")
    assert transport.written.endswith(b"\r\n\r\n4\r\npart\r\n")
    one.end(b"")


def test_a_long_answer_is_not_copied() -> None:
    one, _, transport = asked()
    one.write_whole(200, FIELDS, b"x" * 100_000)
    assert transport.num_writes == 2
    assert transport.written.endswith(b"\r\n\r\n" + b"x" * 100_000)


def test_an_answer_that_closes_its_connection_is_whole() -> None:
    one, _, transport = asked(b"GET /x HTTP/1.1\r\nhost: h\r\nconnection: close\r\n")
    one.write_whole(200, FIELDS, b"body")
    assert (transport.written[-4:], transport.calls) == (b"body", ["close"])
