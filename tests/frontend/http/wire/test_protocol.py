"""A connection by itself: bounds of size and of time, on a clock of the test's, and the order of answers."""

import time
from collections.abc import Iterator

import pytest
from uvicorn.server import ServerState

from frontend.http.wire.held_bodies import HeldBodies
from frontend.http.wire.protocol import MAX_FIELDS
from tests.frontend.http.peer import App, connected, status, turning

HEAD = b"POST /x HTTP/1.1\r\nhost: h\r\ncontent-length: 10\r\n"


@pytest.fixture(autouse=True)
def loop() -> Iterator[None]:
    with turning():
        yield


@pytest.mark.parametrize(
    ("sent", "seconds", "wanted"),
    [
        (b"", 74, (0, [])),
        (b"", 76, (0, ["close"])),
        (b"\r\n\r\n", 76, (0, ["close"])),
        (b"G", 9, (0, [])),
        (b"GET /x HTTP/1.1\r\nhost:", 11, (408, ["write_eof"])),
        (HEAD + b"\r\n12345", 9, (0, [])),
        (HEAD + b"\r\n12345", 11, (408, ["write_eof"])),
        (HEAD + b"\r\n", 11, (408, ["write_eof"])),
        (HEAD.replace(b" 10", b" 4999") + b"\r\n" + b"x" * 4000, 13, (0, [])),
        (HEAD.replace(b" 10", b" 4999") + b"\r\n" + b"x" * 4000, 15, (408, ["write_eof"])),
        (HEAD + b"\r\n1234567890", 1000, (0, [])),  # complete: the answer may take its time
    ],
)
def test_slow_peers(sent: bytes, seconds: float, wanted: tuple[int, list[str]]) -> None:
    protocol, transport = connected(App())
    if sent:
        protocol.data_received(sent)
    protocol.sweep(time.monotonic() + seconds)
    assert (status(transport), transport.calls) == wanted


def test_a_refused_peer_has_a_while_to_read_why() -> None:
    protocol, transport = connected(App())
    protocol.data_received(HEAD.replace(b" 10", b" 9999") + b"\r\n" + b"x" * 100)
    assert (status(transport), transport.calls) == (413, ["write_eof"])
    protocol.data_received(b"x" * 9000)  # nobody looks at it
    protocol.sweep(time.monotonic() + 1)
    assert transport.calls == ["write_eof"]
    protocol.sweep(time.monotonic() + 3)
    assert transport.calls == ["write_eof", "abort"]


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        (b"GET /" + b"a" * 66_000, 431),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (MAX_FIELDS + 1) + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"".join(b"a%d: %b\r\n" % (i, b"v" * 1000) for i in range(70)) + b"\r\n", 431),
        (HEAD.replace(b"content-length: 10", b"transfer-encoding: chunked") + b"\r\n1400\r\n" + b"x" * 5120, 413),
        (b"GET / HTTP/2.0\r\nhost: h\r\n\r\n", 400),
        (b"GET / HTTP/0.9\r\nhost: h\r\n\r\n", 400),
        (b"CONNECT h:1 HTTP/1.1\r\nhost: h\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\na: b\r\n\r\n", 400),
    ],
)
def test_bounds_hold_however_the_bytes_are_cut(sent: bytes, wanted: int) -> None:
    for size in (len(sent), 1000, 7):
        protocol, transport = connected(App())
        for at in range(0, len(sent), size):
            protocol.data_received(sent[at : at + size])
        assert (status(transport), transport.calls) == (wanted, ["write_eof"]), size
        assert transport.written.count(b"HTTP/1.1 4") == 1


def test_an_endless_field_is_not_kept() -> None:
    protocol, transport = connected(App())
    protocol.data_received(b"GET / HTTP/1.1\r\na: ")
    for _ in range(100):
        protocol.data_received(b"b" * 1000)
    assert status(transport) == 431


def test_neither_an_endless_trailer_nor_endless_extensions_are_read() -> None:
    begin = b"POST /x HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n1"
    for more in (b"\r\na\r\n0\r\na: ", b";a="):
        protocol, transport = connected(App())
        protocol.data_received(begin + more)
        for _ in range(200):
            protocol.data_received(b"b" * 1000)
        assert status(transport) == 431, more


def test_a_body_in_chunks_of_one_byte_is_taken() -> None:
    app = App()
    protocol, transport = connected(app)
    protocol.data_received(b"POST /x HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n")
    for _ in range(5000):
        protocol.data_received(b"1\r\na\r\n")
    protocol.data_received(b"0\r\n\r\n")
    assert (b"".join(app.requests[0].parts), transport.written) == (b"a" * 5000, b"")


def test_a_head_counts_once_however_it_is_cut() -> None:
    """It was refused from half of the bound on where it came in pieces."""
    sent = b"GET / HTTP/1.1\r\nhost: h\r\n" + b"".join(b"a%d: %b\r\n" % (i, b"v" * 1000) for i in range(60)) + b"\r\n"
    for size in (len(sent), 1400):
        app = App()
        protocol, _ = connected(app)
        for at in range(0, len(sent), size):
            protocol.data_received(sent[at : at + size])
        assert len(app.requests) == 1, size


def test_nothing_is_read_of_a_peer_that_does_not_read() -> None:
    """Its refusals would fill this server's memory, many bytes for each of its own."""
    protocol, transport = connected(App(refused=("/no",)))
    protocol.data_received(b"GET /no HTTP/1.1\r\nhost: h\r\n\r\n")
    protocol.pause_writing()
    assert transport.calls == ["pause_reading"]
    protocol.data_received(b"GET /1 HTTP/1.1\r\nhost: h\r\n\r\nGET /2 HTTP/1.1\r\nhost: h\r\n\r\n")
    protocol.resume_writing()
    assert transport.calls == ["pause_reading"]  # now for the second request, which waits
    protocol, transport = connected(App(refused=("/no",)))
    protocol.data_received(b"GET /no HTTP/1.1\r\nhost: h\r\n\r\n")
    protocol.pause_writing()
    protocol.resume_writing()
    assert transport.calls == ["pause_reading", "resume_reading"]


def test_requests_behind_one_another_are_counted_apart() -> None:
    sent = b"".join(
        b"POST /%d HTTP/1.1\r\nhost: h\r\na: %b\r\ncontent-length: 4000\r\n\r\n" % (i, b"v" * 30_000) + b"x" * 4000
        for i in range(3)
    )
    app = App()
    protocol, _ = connected(app)
    for at in range(10, len(sent) + 34_000, 34_000):  # each piece has a part of two requests
        protocol.data_received(sent[max(0, at - 34_000) : at])
        for request in app.requests:
            if not request.exchange.is_complete:
                request.exchange.write_whole(200, [], b"")
    assert [request.path for request in app.requests] == ["/0", "/1", "/2"]


def test_answers_keep_the_order_of_requests() -> None:
    app = App(refused=("/no",))
    protocol, transport = connected(app)
    protocol.data_received(b"".join(b"GET /%b HTTP/1.1\r\nhost: h\r\n\r\n" % path for path in (b"1", b"no", b"2")))
    assert [request.path for request in app.requests] == ["/1"]
    assert (transport.written, transport.calls) == (b"", ["pause_reading"])
    app.requests[0].exchange.write_whole(200, [], b"first")
    assert [request.path for request in app.requests] == ["/1", "/no", "/2"]
    assert transport.calls == ["pause_reading", "resume_reading"]
    app.requests[2].exchange.write_whole(200, [], b"second")
    parts = [transport.written.index(word) for word in (b"first", b"refused", b"second")]
    assert parts == sorted(parts)


def test_what_is_no_http_is_refused_behind_the_answer_that_runs() -> None:
    app = App()
    protocol, transport = connected(app)
    protocol.data_received(b"GET /1 HTTP/1.1\r\nhost: h\r\n\r\nrubbish\r\n\r\n")
    assert transport.written == b""
    app.requests[0].exchange.write_whole(200, [], b"first")
    first, _, rest = transport.written.partition(b"first")
    assert first.startswith(b"HTTP/1.1 200 ")
    assert rest.startswith(b"HTTP/1.1 400 ")
    assert transport.calls == ["write_eof"]


def test_a_body_is_asked_for_only_where_it_is_wanted() -> None:
    for path, wanted in ((b"/x", b"HTTP/1.1 100 Continue\r\n\r\n"), (b"/no", b"HTTP/1.1 404 ")):
        protocol, transport = connected(App(refused=("/no",)))
        protocol.data_received(HEAD.replace(b"/x", path) + b"expect: 100-continue\r\n\r\n")
        assert transport.written.startswith(wanted)


@pytest.mark.parametrize("expects", [True, False])
def test_who_asked_before_the_body_and_was_refused_may_not_send_there(expects: bool) -> None:
    """Whether the body comes still is open, so the next request on this connection could be taken for it."""
    app = App(refused=("/no",))
    protocol, transport = connected(app)
    protocol.data_received(HEAD.replace(b"/x", b"/no") + b"expect: 100-continue\r\n" * expects + b"\r\n")
    assert (b"connection: close" in transport.written) is expects
    assert transport.calls == ["write_eof"] * expects
    protocol.data_received(b"1234567890GET /x HTTP/1.1\r\nhost: h\r\n\r\n")
    assert [one.path for one in app.requests] == (["/no"] if expects else ["/no", "/x"])


OFFERS = (
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAARAAAAAAAIAAAAA\r\n",
    b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n",
    b"upgrade: foo/1, TLS/1.2\r\nconnection: keep-alive, Upgrade\r\n",
)
FRAMED = (
    b"content-length: 10\r\n\r\n1234567890",
    b"transfer-encoding: chunked\r\n\r\n4\r\n1234\r\n6\r\n567890\r\n0\r\n\r\n",
)


@pytest.mark.parametrize("framed", FRAMED)
@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("size", [1000, 50, 1])
def test_an_offer_to_upgrade_is_ignored_and_the_body_read(offer: bytes, framed: bytes, size: int) -> None:
    """Java's HttpClient and `curl --http2` make one with every POST; the next request comes on the same connection."""
    app, bodies = App(), HeldBodies(1 << 20)
    protocol, transport = connected(app, bodies=bodies)
    sent = b"POST /x HTTP/1.1\r\nhost: h\r\n" + offer + framed
    for at in range(0, len(sent), size):
        protocol.data_received(sent[at : at + size])
    (first,) = app.requests
    assert (b"".join(first.parts), first.fields.get(b"upgrade")) == (b"1234567890", None)
    first.exchange.write_whole(200, [], b"body")
    assert (b"connection: close" in transport.written, transport.calls) == (False, [])
    protocol.data_received(b"GET /2 HTTP/1.1\r\nhost: h\r\n\r\n")
    assert [one.path for one in app.requests] == ["/x", "/2"]
    assert (bodies.num_bytes, bodies.unfinished) == (0, {})


def test_many_offers_in_one_read_are_counted() -> None:
    app = App()
    protocol, transport = connected(app)
    protocol.data_received((b"GET /x HTTP/1.1\r\nhost: h\r\n" + OFFERS[0] + b"\r\n") * 2000)
    for index in range(33):
        app.requests[index].exchange.write_whole(200, [], b"")
    assert (transport.written.count(b"HTTP/1.1 200"), transport.written.count(b"HTTP/1.1 400")) == (33, 1)


def test_what_follows_an_ignored_offer_is_read_as_http_1() -> None:
    app = App()
    protocol, transport = connected(app)
    protocol.data_received(b"GET /x HTTP/1.1\r\nhost: h\r\n" + OFFERS[0] + b"\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    app.requests[0].exchange.write_whole(200, [], b"body")
    assert transport.written.count(b"HTTP/1.1 400 ") == 1
    assert transport.calls == ["write_eof"]


def test_connections_beyond_the_bound_are_refused() -> None:
    others = ServerState()
    kept = [connected(App(), others, 3) for _ in range(3)]
    _, beyond = connected(App(), others, 3)
    assert (status(beyond), beyond.calls[-1]) == (503, "close")
    assert [one.written for _, one in kept] == [b"", b"", b""]


def test_who_leaves_is_told_to_the_request_that_is_answered() -> None:
    app, told = App(), list[str]()
    protocol, _ = connected(app)
    protocol.data_received(b"GET /1 HTTP/1.1\r\nhost: h\r\n\r\nGET /2 HTTP/1.1\r\nhost: h\r\n\r\n")
    app.requests[0].exchange.on_left = lambda: told.append("left")
    protocol.connection_lost(None)
    assert (told, len(app.requests)) == (["left"], 1)
