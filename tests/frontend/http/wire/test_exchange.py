"""The framing of answers for each kind of peer, and what leaves the server when."""

import pytest

from frontend.http.errors import Headers
from frontend.http.wire.exchange import Exchange
from frontend.http.wire.head import Heads

FIELDS: Headers = [(b"content-type", b"text/plain")]


class Recorder:
    """A wire that keeps each write."""

    def __init__(self) -> None:
        self.heads = Heads()
        self.is_full = False
        self.writes: list[bytes] = []
        self.completed: list[Exchange] = []

    def send(self, data: bytes) -> None:
        self.writes.append(data)

    def complete(self, exchange: Exchange) -> None:
        self.completed.append(exchange)

    def abort(self) -> None:
        raise AssertionError


def exchange(wire: Recorder, *, is_head: bool = False, is_http_1_0: bool = False, keep_alive: bool = True) -> Exchange:
    return Exchange(wire, is_head=is_head, is_http_1_0=is_http_1_0, keep_alive=keep_alive)


def test_a_stream_is_one_write_for_its_head_and_first_part() -> None:
    wire = Recorder()
    one = exchange(wire)
    one.begin(FIELDS)
    assert wire.writes == []
    one.write(b"data: 1\n\n")
    one.write(b"")
    one.write(b"x" * 17)
    one.end(b"end")
    head, _, first = wire.writes[0].partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\ndate: ")
    assert b"transfer-encoding: chunked" in head
    assert first == b"9\r\ndata: 1\n\n\r\n"
    assert wire.writes[1:] == [b"11\r\n" + b"x" * 17 + b"\r\n", b"3\r\nend\r\n0\r\n\r\n"]
    assert wire.completed == [one]


def test_a_stream_of_http_1_0_ends_with_the_connection() -> None:
    wire = Recorder()
    one = exchange(wire, is_http_1_0=True)
    one.begin(FIELDS)
    one.write(b"a\n\n")
    one.end(b"")
    head, _, body = b"".join(wire.writes).partition(b"\r\n\r\n")
    assert (body, one.keep_alive) == (b"a\n\n", False)
    assert b"connection: close" in head
    assert b"chunked" not in head


@pytest.mark.parametrize("is_http_1_0", [False, True])
@pytest.mark.parametrize("keep_alive", [False, True])
def test_a_whole_answer(is_http_1_0: bool, keep_alive: bool) -> None:
    wire = Recorder()
    exchange(wire, is_http_1_0=is_http_1_0, keep_alive=keep_alive).write_whole(404, FIELDS, b"gone")
    (written,) = wire.writes
    head, _, body = written.partition(b"\r\n\r\n")
    assert (body, b"content-length: 4" in head) == (b"gone", True)
    assert (b"connection: close" in head) is not keep_alive
    assert (b"connection: keep-alive" in head) is (keep_alive and is_http_1_0)


def test_an_answer_to_head_has_no_body() -> None:
    wire = Recorder()
    exchange(wire, is_head=True).write_whole(200, FIELDS, b"body")
    stream = exchange(wire, is_head=True)
    stream.begin(FIELDS)
    stream.write(b"part")
    stream.end(b"end")
    assert wire.writes[0].endswith(b"content-length: 4\r\n\r\n")
    assert b"".join(wire.writes[1:]).endswith(b"\r\n\r\n")
    assert b"part" not in b"".join(wire.writes)


def test_nothing_is_written_to_a_peer_that_left() -> None:
    wire, told = Recorder(), list[str]()
    one = exchange(wire)
    one.on_left = lambda: told.append("left")
    one.begin(FIELDS)
    one.leave()
    one.write(b"x")
    one.end(b"y")
    one.write_whole(200, FIELDS, b"z")
    assert (wire.writes, wire.completed, told) == ([], [], ["left"])


def test_no_field_can_end_its_line() -> None:
    with pytest.raises(AssertionError, match="line ends"):
        Heads().head(200, [(b"x", b"1\r\ny: 2")], b"")
