"""`engine-core record`: the relay changes no byte, the file says what passed and has no text and no key."""

import asyncio
import contextlib
import gzip
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import uvloop

from ipc.errors import ConfigError
from tests.frontend.http.caller import environment
from tools.cli import main
from tools.commands.record import relay
from tools.commands.record.bodies import read_part, read_prompt, route_of
from tools.commands.record.exchanges import Connection, Recording, salted_blocks
from tools.commands.record.relay import HostField, Observer, Relay, new_recording, parse_upstream
from tools.commands.record.traffic import BLOCK_BYTES, Exchange, Totals, TrafficWriter, read_traffic

CANARY = "the quick brown canary"
KEY = "sk-canary-key"
CHAT = {
    "model": "demo",
    "stream": True,
    "max_tokens": 9,
    "messages": [{"role": "user", "content": CANARY * 40}],
}


def request(path: str = "/v1/chat/completions", body: Any = CHAT, *fields: str, method: str = "POST") -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path}?key={KEY} HTTP/1.1", "host: there", f"authorization: Bearer {KEY}", *fields]
    return "\r\n".join([*lines, f"content-length: {len(data)}", "", ""]).encode() + data


def chunked(*parts: bytes, trailer: bytes = b"") -> bytes:
    return b"".join(b"%X;ext=1\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n" + trailer + b"\r\n"


def answer(body: bytes, *fields: str, status: str = "200 OK", kind: str = "application/json") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", *fields]
    return "\r\n".join([*lines, "", ""]).encode() + body


def sse(*events: Any) -> list[bytes]:
    return [f"data: {json.dumps(one)}\n\n".encode() for one in events] + [b"data: [DONE]\n\n"]


DELTAS = sse(
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"content": CANARY}}]},
    {"choices": [{"delta": {"reasoning_content": "b", "reasoning": "b"}}]},
    {
        "choices": [],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
    },
)
USED = {"choices": [{"message": {"content": CANARY}}], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
WHOLE = json.dumps(USED).encode()
CHUNKED = "Transfer-Encoding: chunked"


class Case(NamedTuple):
    """What a client sends and what the server answers. expected: fields of the exchanges; others: other requests."""

    sent: bytes
    answered: bytes
    expected: list[dict[str, Any]]
    others: int = 0
    closes: bool = False  # the server, after its answer


STREAMED = {"status": 200, "is_stream": True, "input_tokens": 7, "output_tokens": 3, "cached_tokens": 4, "end": ""}
ANSWERED = {"status": 200, "is_stream": False, "input_tokens": 7, "output_tokens": 3, "ttft_ms": None, "end": ""}
NOT_STREAMED = {**CHAT, "stream": False}
NDJSON = [{"message": {"content": "a"}}, {"done": True, "prompt_eval_count": 5, "eval_count": 2, "response": ""}]
CASES = {
    "events": Case(request(), answer(chunked(*DELTAS), CHUNKED, kind="text/event-stream"), [STREAMED]),
    "odd chunks": Case(
        request(body=CHAT),
        answer(
            chunked(*(b"".join(DELTAS)[at : at + 7] for at in range(0, len(b"".join(DELTAS)), 7))),
            CHUNKED,
            kind="text/event-stream",
        ),
        [STREAMED],
    ),
    "trailers": Case(
        request(), answer(chunked(*DELTAS, trailer=b"x-sum: 1\r\n"), CHUNKED, kind="text/event-stream"), [STREAMED]
    ),
    "lines of JSON": Case(
        request("/api/chat", {"model": "m", "messages": []}),
        answer(b"".join(json.dumps(one).encode() + b"\n" for one in NDJSON), kind="application/x-ndjson"),
        [{"input_tokens": 5, "output_tokens": 2, "is_stream": True, "output_events": 1}],
        closes=True,
    ),
    "gzip": Case(
        request(body=NOT_STREAMED),
        answer(gzip.compress(WHOLE), f"Content-Length: {len(gzip.compress(WHOLE))}", "Content-Encoding: gzip"),
        [ANSWERED],
    ),
    "an error": Case(request(), answer(b"{}", "Content-Length: 2", status="500 No"), [{"status": 500, "end": ""}]),
    "until the end": Case(request(body=NOT_STREAMED), answer(WHOLE), [ANSWERED], closes=True),
    "cut": Case(
        request(),
        answer(chunked(*DELTAS)[:-9], CHUNKED, kind="text/event-stream"),
        [{**STREAMED, "end": "server"}],
        closes=True,
    ),
    "continue": Case(
        request(
            "/v1/completions",
            {"prompt": [1, 2, 3]},
            "Expect: 100-continue",
        ),
        b"HTTP/1.1 100 Continue\r\n\r\n" + answer(WHOLE, f"Content-Length: {len(WHOLE)}"),
        [{**ANSWERED, "route": "/completions"}],
    ),
    "others": Case(
        request("/v1/models", None, method="HEAD")
        + request("/v1/models", None, method="GET")
        + request(body=NOT_STREAMED),
        answer(b"", "Content-Length: 99")
        + answer(b"", status="304 Same")
        + answer(WHOLE, f"Content-Length: {len(WHOLE)}"),
        [ANSWERED],
        others=2,
    ),
    "an offer of HTTP/2": Case(
        request("/v1/models", None, "Connection: Upgrade", "Upgrade: h2c", method="GET") + request(body=NOT_STREAMED),
        answer(b"{}", "Content-Length: 2") + answer(WHOLE, f"Content-Length: {len(WHOLE)}"),
        [ANSWERED],
        others=1,
    ),
    "an upgrade": Case(
        request("/ws", None, "Connection: Upgrade", "Upgrade: websocket", method="GET"),
        answer(b"\x82\x01\x00", "Upgrade: websocket", "Connection: Upgrade", status="101 Switching Protocols"),
        [],
        others=1,
    ),
    "no HTTP": Case(b"\x16\x03\x01 what is this", b"\x15\x03\x00nothing", []),
}


def fields_of(exchange: Exchange, expected: dict[str, Any]) -> dict[str, Any]:
    return {name: getattr(exchange, name) for name in expected}


def observed(case: Case, cuts: random.Random | None = None) -> Connection:
    """The case's bytes read at once, or in random pieces."""
    connection = Connection(Recording(0, b"k", False))
    now = 10**9
    for data, from_client in ((case.sent, True), (case.answered, False)):
        while data:
            size = len(data) if cuts is None else cuts.randrange(1, 40)
            connection.feed(data[:size], now, from_client=from_client)
            data, now = data[size:], now + 10**6
    connection.end(now, "server" if case.closes else "client")
    return connection


@pytest.mark.parametrize("name", CASES)
def test_what_passes_is_understood_however_it_is_cut(name: str) -> None:
    case = CASES[name]
    for seed in range(12):
        connection = observed(case, random.Random(seed) if seed else None)
        exchanges = connection.take()
        assert [fields_of(*pair) for pair in zip(exchanges, case.expected, strict=True)] == case.expected
        assert connection.num_others == case.others
        assert connection.is_understood == (name != "no HTTP")


def test_what_follows_an_upgrade_is_not_read() -> None:
    connection = observed(CASES["an upgrade"])
    connection.feed(b"\x81\x00\xff", 0, from_client=True)
    connection.feed(b"\x81\x00\xff", 0, from_client=False)
    assert connection.is_understood


class Site:
    """A server that says what its script says, a relay in front of it, and what both saw."""

    def __init__(self, path: Path, *, max_connections: int = 8, content: bool = False) -> None:
        self.path, self._content, self._max = path, content, max_connections
        self.received = bytearray()
        self.answered = b""
        self.closes = False
        self.left = asyncio.Event()
        self.wanted = 0
        self.told: list[str] = []

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator["Site"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.server_port = server.sockets[0].getsockname()[1]
        writer = TrafficWriter(str(self.path), has_content=self._content)
        self.observer = Observer(writer, new_recording(keeps_content=self._content), self.told.append)
        upstream = parse_upstream(f"http://127.0.0.1:{self.server_port}")
        self.relay = Relay(upstream, self.observer, self._max)
        listening = await asyncio.get_running_loop().create_server(self.relay.protocol, "127.0.0.1", 0)
        self.port = listening.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            self.relay.cut()
            for one in (listening, server):
                one.close()
            await self.observer.read_all()
            self.observer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while self.wanted > len(self.received) and (data := await reader.read(65_536)):
                self.received += data
            for at in range(0, len(self.answered), 100):  # in pieces, as a model would
                writer.write(self.answered[at : at + 100])
                await asyncio.sleep(0)
            if not self.closes:
                await reader.read()
            self.left.set()
        writer.close()

    def exchanges(self) -> list[Exchange]:
        return list(read_traffic(self.path)[1])


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    uvloop.run(scene())


def test_no_byte_is_changed(tmp_path: Path) -> None:
    """Through real sockets; the observer has seen every exchange of every case."""

    async def scene() -> None:
        for number, case in enumerate(CASES.values()):
            async with Site(tmp_path / str(number)).open() as site:
                site.answered, site.closes, site.wanted = case.answered, case.closes, len(case.sent)
                reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
                for at in range(0, len(case.sent), 50):
                    writer.write(case.sent[at : at + 50])
                    await asyncio.sleep(0)
                got = await reader.readexactly(len(case.answered))
                if not case.closes:
                    writer.close()
                    await asyncio.wait_for(site.left.wait(), 10)
                assert await reader.read() == b""
                writer.close()
                assert got == case.answered
                assert bytes(site.received) == case.sent
            exchanges = site.exchanges()
            assert [fields_of(*pair) for pair in zip(exchanges, case.expected, strict=True)] == case.expected

    run(scene)


@pytest.mark.parametrize("resets", [False, True])
def test_a_client_that_leaves_ends_the_servers_work(tmp_path: Path, resets: bool) -> None:
    async def scene() -> None:
        async with Site(tmp_path / "t").open() as site:
            site.answered = CASES["events"].answered[:-40]
            site.wanted = len(CASES["events"].sent)
            reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
            writer.write(CASES["events"].sent)
            await reader.readexactly(len(site.answered))
            if resets:
                writer.transport.abort()
            writer.close()
            await asyncio.wait_for(site.left.wait(), 10)
        (one,) = site.exchanges()
        assert (one.end, one.output_events, one.status) == ("client", 2, 200)
        assert one.ttft_ms is not None

    run(scene)


def test_a_server_that_is_not_there_is_502_and_one_connection_too_many_is_503(tmp_path: Path) -> None:
    async def scene() -> None:
        async with Site(tmp_path / "t", max_connections=1).open() as site:
            held, holder = await asyncio.open_connection("127.0.0.1", site.port)
            await asyncio.sleep(0.02)
            reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
            assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
            writer.close()
            holder.close()
            del held
            await asyncio.wait_for(site.left.wait(), 10)
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                site.relay.upstream = parse_upstream(f"http://127.0.0.1:{free.getsockname()[1]}")
            await asyncio.sleep(0.02)
            reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            got = await reader.read()
            assert got.startswith(b"HTTP/1.1 502 ")
            assert b"cannot reach the server" in got
            writer.close()

    run(scene)


def test_a_client_that_does_not_read_holds_little(tmp_path: Path) -> None:
    """The server can send only what the sockets and two buffers hold."""

    async def scene() -> None:
        async with Site(tmp_path / "t").open() as site:
            loop, sent = asyncio.get_running_loop(), 0
            listener = socket.create_server(("127.0.0.1", 0))
            site.relay.upstream = parse_upstream(f"http://127.0.0.1:{listener.getsockname()[1]}")
            listener.setblocking(False)
            with socket.create_connection(("127.0.0.1", site.port)) as client:
                upstream, _ = await loop.sock_accept(listener)
                with listener, upstream:
                    upstream.setblocking(False)
                    for _ in range(400):
                        try:
                            sent += upstream.send(bytes(1 << 20))
                        except BlockingIOError:
                            await asyncio.sleep(0.001)
                    assert 0 < sent < 64 << 20
                    client.settimeout(10)
                    got = 0
                    while got < sent:
                        await asyncio.sleep(0)
                        got += len(client.recv(1 << 20))

    run(scene)


@pytest.mark.parametrize("content", [False, True])
def test_texts_are_written_only_if_asked_and_keys_never(tmp_path: Path, content: bool) -> None:
    async def scene() -> None:
        async with Site(tmp_path / "t", content=content).open() as site:
            case = CASES["events"]
            site.answered, site.wanted = case.answered, len(case.sent)
            reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
            writer.write(case.sent)
            await reader.readexactly(len(case.answered))
            writer.close()
            await asyncio.wait_for(site.left.wait(), 10)

    run(scene)
    written = (tmp_path / "t").read_text()
    assert ("canary" in written) == content
    assert KEY not in written
    assert (tmp_path / "t").stat().st_mode & 0o777 == 0o600
    (one,) = read_traffic(tmp_path / "t")[1]
    assert one.input_bytes == len("user") + 40 * len(CANARY)
    assert len(one.blocks) == one.input_bytes // BLOCK_BYTES
    if content:
        assert json.loads(bytes(one.request)) == CHAT
        assert one.answer == CANARY + "b"


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_only_the_host_field_is_replaced_and_only_if_asked(size: int) -> None:
    chunks = b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\nHOST:  x:1\r\n\r\n" + chunked(
        b"\r\nhost: in a body\r\n\r\n", trailer=b"host: in a trailer\r\n"
    )
    sent = (
        b"".join(case.sent for case in CASES.values() if case.sent.isascii() and case.sent.startswith(b"POST")) + chunks
    )
    sent += b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: w\r\n\r\n\r\nhost: another protocol\r\n\r\n"
    field = HostField(b"api.example:1")
    got = b"".join(field.feed(sent[at : at + size]) for at in range(0, len(sent), size))
    expected = sent.replace(b"host: there", b"host: api.example:1").replace(b"HOST:  x:1", b"HOST:  api.example:1")
    assert got == expected.replace(b"Host: x\r", b"Host: api.example:1\r")
    fields = [
        parse_upstream(f"{scheme}://h:1", how).host_field
        for scheme in ("http", "https")
        for how in (None, "keep", "upstream")
    ]
    assert fields == [None, None, b"h:1", b"h:1", None, b"h:1"]


def test_equal_beginnings_have_equal_hashes_in_one_recording_only() -> None:
    first, size = b"a" * (2 * BLOCK_BYTES + 9), BLOCK_BYTES
    one, other = salted_blocks(first + b"b" * 2 * size, b"key"), salted_blocks(first + b"c" * 2 * size, b"key")
    assert [x == y for x, y in zip(one, other, strict=True)] == [True, True, False, False]
    assert len(set(one)) == 4, "the same bytes at another place are another beginning"
    assert not set(one) & set(salted_blocks(first + b"b" * 2 * size, b"other key"))
    assert max(one) < 2**53


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ({"choices": [{"text": "ab"}], "usage": None}, ("ab", None, None, None)),
        ({"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "{}"}}]}}]}, ("{}", None, None, None)),
        ({"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 1}}}, ("", 9, None, 1)),
        ({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}, ("a", None, None, None)),
        ({"type": "message_delta", "usage": {"output_tokens": 12}}, ("", None, None, 12)),
        (
            {
                "type": "message",
                "content": [{"type": "text", "text": "hi"}],
                "usage": {
                    "input_tokens": 2,
                    "output_tokens": 3,
                    "cache_read_input_tokens": 5,
                    "cache_creation_input_tokens": 1,
                },
            },
            ("hi", 8, 5, 3),
        ),
        ({"type": "response.output_text.delta", "delta": "x"}, ("x", None, None, None)),
        (
            {
                "type": "response.completed",
                "response": {
                    "usage": {"input_tokens": 4, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 3}},
                    "output": [{"content": [{"text": "again"}]}],
                },
            },
            ("", 4, 3, 2),
        ),
        ({"response": "a", "done": False}, ("a", None, None, None)),
        ({"response": "", "done": True, "prompt_eval_count": 0, "eval_count": 8}, ("", 0, None, 8)),
        ({"content": "c", "stop": False}, ("c", None, None, None)),
        ({"content": "", "stop": True, "tokens_evaluated": 6, "tokens_predicted": 1}, ("", 6, None, 1)),
        ([1], ("", None, None, None)),
        (
            {"choices": [3, {"delta": "x"}], "usage": {"prompt_tokens": -1, "completion_tokens": True}},
            ("", None, None, None),
        ),
    ],
)
def test_each_apis_events_are_read(event: Any, expected: tuple[Any, ...]) -> None:
    assert read_part(json.dumps(event).encode()) == expected


def test_prompts_are_read_in_the_order_of_templates() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:secret"}}
    messages = [{"content": [{"type": "text", "text": "m"}, image]}]
    prompt = read_prompt(
        {"n": 2, "messages": messages, "system": "s", "tools": [{"function": {"name": "t"}}], "model": 5}
    )
    assert prompt == (b"tsm", None, 1, 2, None, "5", False)
    ids = read_prompt({"prompt": [1, 2, 70_000], "max_tokens": 5, "stream": True})
    assert (len(ids.data), ids.num_tokens, ids.max_tokens, ids.is_stream) == (12, 3, 5, True)
    assert read_prompt(None).data == read_prompt([]).data == b""
    assert read_prompt({"messages": 5, "n": "x", "options": {"num_predict": 7}}).max_tokens == 7
    assert [route_of(path) for path in (b"/x/v1/chat/completions?k=1", b"/v1/models")] == ["/chat/completions", None]


def test_bodies_that_take_too_much_memory_are_given_up_and_still_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "_MAX_HELD", 500)

    async def scene() -> None:
        async with Site(tmp_path / "t").open() as site:
            case = CASES["events"]
            assert len(case.sent) > 700
            site.answered, site.wanted = case.answered, len(case.sent)
            reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
            writer.write(case.sent[:-1])
            while len(site.received) < len(case.sent) - 1:
                await asyncio.sleep(0.001)
            await site.observer.read_all()
            writer.write(case.sent[-1:])
            assert await reader.readexactly(len(case.answered)) == case.answered
            writer.close()
            await asyncio.wait_for(site.left.wait(), 10)
            assert bytes(site.received) == case.sent

    run(scene)
    assert list(read_traffic(tmp_path / "t")[1]) == []
    totals = msgspec.json.decode((tmp_path / "t").read_bytes().splitlines()[-1], type=Totals)
    assert totals == Totals(0, 0, 1)


def test_a_file_is_read_up_to_a_cut_line_and_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "t"
    writer = TrafficWriter(str(path), has_content=False)
    writer.add([Exchange(1.5, "/completions", blocks=(1, 2)), Exchange(2.5, "/completions")])
    writer.close(Totals(1, 0, 0))
    head, exchanges = read_traffic(path)
    assert (head.block_bytes, [one.arrival_ms for one in exchanges]) == (BLOCK_BYTES, [1.5, 2.5])
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b'"arrival_ms":2.5') + 4])
    assert len(list(read_traffic(path)[1])) == 1
    path.write_bytes(data.replace(b'"arrival_ms":2.5', b'"arrival_ms":"x"'))
    with pytest.raises(ConfigError, match="line 3"):
        list(read_traffic(path)[1])
    for wrong in (b"1e999", b"-1"):
        path.write_bytes(data.replace(b'"arrival_ms":2.5', b'"arrival_ms":' + wrong))
        with pytest.raises(ConfigError, match="line 3"):
            list(read_traffic(path)[1])
    path.write_bytes(data.replace(b"[1,2]", b"[9007199254740992]"))
    with pytest.raises(ConfigError, match="line 2"):
        list(read_traffic(path)[1])
    path.write_bytes(data.replace(b'"version":1', b'"version":2'))
    with pytest.raises(ConfigError, match="this one reads 1"):
        read_traffic(path)
    with pytest.raises(ConfigError, match="exists"):
        TrafficWriter(str(path), has_content=False)


@pytest.mark.parametrize("url", ["ftp://x", "http://x/v1", "http://me:secret@x", "http://x:99999", "http://"])
def test_an_upstream_that_is_no_servers_root_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_upstream(url)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--listen", "here"], "--listen must be HOST:PORT"),
        (["--listen", "0.0.0.0:0"], "open to other machines"),
        (["--listen", "127.0.0.1:0", "--max-connections", "0"], "--max-connections must be from 1"),
        (["--listen", "127.0.0.1:0", "--upstream", "http://h/v1"], "the root of a server"),
        (["--listen", "127.0.0.1:0"], "exists"),
    ],
)
def test_wrong_options_are_named(
    tmp_path: Path, options: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "day.jsonl"
    path.touch()
    assert main(["record", "--upstream", "127.0.0.1:1", "-o", str(path), *options]) == 1
    assert match in capsys.readouterr().err
    assert path.read_bytes() == b""


def test_the_command_ends_with_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "day.jsonl"
    with socket.create_server(("127.0.0.1", 0)) as upstream:
        options = ["--upstream", f"127.0.0.1:{upstream.getsockname()[1]}", "--listen", "127.0.0.1:0", "-o", str(path)]
        process = subprocess.Popen(
            [sys.executable, "-m", "engine_core", "record", *options],
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("engine-core: recording at http://127.0.0.1:"), line
        port = int(line.split(" in front")[0].rsplit(":", 1)[1])
        case = CASES["events"]
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(case.sent)
            peer, _ = upstream.accept()
            with peer:
                got = b""
                while len(got) < len(case.sent):
                    got += peer.recv(65_536)
                peer.sendall(case.answered[:-20])
                assert client.recv(10) == case.answered[:10]
                process.send_signal(signal.SIGINT)
                _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, f"engine-core: 1 exchanges in {path}\n")
    (one,) = read_traffic(path)[1]
    assert one.end == "proxy"
    assert msgspec.json.decode(path.read_bytes().splitlines()[-1], type=Totals) == Totals(0, 0, 0)
    assert os.access(path, os.R_OK)
