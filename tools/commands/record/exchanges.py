"""Exchanges: reads the HTTP/1 messages of a connection next to the relay, and says what each exchange was.

Nothing here can change, delay or stop the bytes: a message that is not understood ends the reading of its connection.
"""

import zlib
from collections import deque
from hashlib import blake2b
from typing import Any, NamedTuple

import httptools
import msgspec

from tools.commands.record.bodies import NO_PART, Part, read_part, read_prompt, route_of
from tools.commands.record.traffic import BLOCK_BYTES, Exchange
from tools.commands.replay.latency import percentile

_MS = 1e-6  # of a nanosecond
_MAX_BODY = 32 << 20  # bytes that are read of a body; the relay passes on all
_MAX_LINE = 4 << 20  # bytes of one event
_MAX_TIMES = 65_536  # of one stream
_MAX_BLOCKS = 16_384
_MAX_PENDING = 1024  # requests of a connection that wait for their answers
_HEAD_END = b"\r\n\r\n"
_HASH_BYTES = 6  # of a block: a JSON number holds them exactly


class Recording(NamedTuple):
    """What all connections share. key: of the hashes; it is made for one recording and never written."""

    begin_ns: int
    key: bytes
    keeps_content: bool


class _Open:
    """A request whose answer has not ended."""

    def __init__(self, method: bytes, path: bytes) -> None:
        self.is_head = method == b"HEAD"
        route = route_of(path) if method == b"POST" else None
        self.exchange = None if route is None else Exchange(0.0, route)
        self.arrival_ns = 0
        self.body = bytearray()
        self.is_whole = False  # the request has been received
        self.times: list[int] = []  # of the parts of its answer
        self.texts: list[str] = []
        self.last_ns = 0


class Connection:
    """The exchanges of one connection between a client and the server. ended: those that are over, taken by take()."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._pending: deque[_Open] = deque()
        self._requests = _Parser(httptools.HttpRequestParser, _Requests(self))
        self._answers = _Parser(httptools.HttpResponseParser, _Answers(self))
        self._head = b""  # of the answer to a HEAD, not complete yet
        self.now_ns = 0
        self.num_others = 0
        self.is_understood = True
        self.is_tunnel = False  # it speaks another protocol since an upgrade
        self._ended: list[Exchange] = []

    def take(self) -> list[Exchange]:
        """Return the exchanges that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def feed(self, data: bytes, now_ns: int, *, from_client: bool) -> None:
        """Read bytes that passed at now_ns (monotonic)."""
        self.now_ns = now_ns
        if not self.is_understood or self.is_tunnel:
            return
        try:
            if from_client:
                self._requests.feed(data)
            elif self._pending and self._pending[0].is_head:
                self._feed_head(data)
            else:
                self._answers.feed(data)
        except (httptools.HttpParserError, _NotUnderstood):
            self.is_understood = False

    @property
    def held(self) -> int:
        """Return the bytes of bodies that are kept until they are complete."""
        answers = self._answers.reader
        assert isinstance(answers, _Answers)
        return len(answers.buffer) + sum(len(one.body) for one in self._pending)

    def give_up(self) -> None:
        """Read nothing more, and forget what is not complete."""
        self.is_understood = False
        for one in self._pending:
            one.body = bytearray()
        self._answers = _Parser(httptools.HttpResponseParser, _Answers(self))

    def end(self, now_ns: int, who: str) -> None:
        """End all exchanges: the connection is closed. who: client, server or proxy, which closed it first."""
        self.now_ns = now_ns
        answers = self._answers.reader
        assert isinstance(answers, _Answers)
        if who == "server" and answers.lasts_until_end and self._pending:
            answers.on_message_complete()
        while self._pending:
            one = self._pending.popleft()
            if one.exchange is not None and (one.is_whole or one.times):
                self._close(one, who)

    def _feed_head(self, data: bytes) -> None:
        """Read the answer to a HEAD: it has no body, whatever its headers say."""
        head, found, rest = (self._head + data).partition(_HEAD_END)
        self._head = b"" if found else head
        if len(head) > 65_536:
            raise _NotUnderstood
        if found:
            self._pending.popleft()
            self.num_others += 1
            if rest:
                self.feed(rest, self.now_ns, from_client=False)

    def begin(self, method: bytes, path: bytes) -> _Open:
        """A request's headers are complete."""
        if len(self._pending) >= _MAX_PENDING:
            raise _NotUnderstood
        one = _Open(method, path)
        self._pending.append(one)
        return one

    def received(self, one: _Open) -> None:
        """A request is complete."""
        one.is_whole, one.arrival_ns = True, self.now_ns
        if one.exchange is None:
            return
        try:
            body = msgspec.json.decode(one.body) if one.body else None
        except (msgspec.DecodeError, RecursionError):
            body = None
        self._describe(one.exchange, body)
        if self._recording.keeps_content and body is not None:
            one.exchange.request = msgspec.Raw(msgspec.json.encode(body))
        one.body = bytearray()

    def _describe(self, exchange: Exchange, body: Any) -> None:
        """Set what a request says."""
        prompt = read_prompt(body)
        exchange.arrival_ms = round((self.now_ns - self._recording.begin_ns) * _MS, 3)
        exchange.model, exchange.is_stream = prompt.model, prompt.is_stream
        exchange.input_bytes, exchange.input_tokens = len(prompt.data), prompt.num_tokens
        exchange.num_images, exchange.num_choices = prompt.num_images, prompt.num_choices
        exchange.max_tokens = prompt.max_tokens
        exchange.blocks = salted_blocks(prompt.data, self._recording.key)

    @property
    def answering(self) -> _Open | None:
        """Return the request that is being answered."""
        return self._pending[0] if self._pending else None

    def note(self, one: _Open, part: Part) -> None:
        """Note a part of an answer that came now."""
        assert one.exchange is not None
        exchange = one.exchange
        if part.input_tokens is not None:
            exchange.input_tokens = part.input_tokens
        if part.cached_tokens is not None:
            exchange.cached_tokens = part.cached_tokens
        if part.output_tokens is not None:
            exchange.output_tokens = part.output_tokens
        if part.text:
            exchange.output_bytes += len(part.text.encode("utf-8", "surrogatepass"))
            exchange.output_events += 1
            one.last_ns = self.now_ns
            if len(one.times) < _MAX_TIMES:
                one.times.append(self.now_ns)
            if self._recording.keeps_content and exchange.output_bytes <= _MAX_BODY:
                one.texts.append(part.text)

    def answered(self, status: int) -> None:
        """An answer is complete."""
        if not self._pending:
            raise _NotUnderstood
        one = self._pending.popleft()
        if one.exchange is None:
            self.num_others += 1
        else:
            one.exchange.status = status
            self._close(one, "")

    def _close(self, one: _Open, who: str) -> None:
        exchange = one.exchange
        assert exchange is not None
        begin_ns = one.arrival_ns or self.now_ns
        exchange.end = who
        exchange.total_ms = round((self.now_ns - begin_ns) * _MS, 3)
        if one.times and exchange.is_stream:
            exchange.ttft_ms = round((one.times[0] - begin_ns) * _MS, 3)
            exchange.last_ms = round((one.last_ns - begin_ns) * _MS, 3)
            gaps = [(after - before) * _MS for before, after in zip(one.times, one.times[1:], strict=False)]
            if gaps:
                p50, p90, p99 = (round(percentile(gaps, share), 3) for share in (0.5, 0.9, 0.99))
                exchange.gaps_ms = p50, p90, p99, round(max(gaps), 3)
        exchange.answer = "".join(one.texts)
        self._ended.append(exchange)


def salted_blocks(data: bytes, key: bytes) -> tuple[int, ...]:
    """Return a hash for each whole block of a prompt, of that block and all before it, under a secret key."""
    before, found = b"", []
    for at in range(0, min(len(data), _MAX_BLOCKS * BLOCK_BYTES) - BLOCK_BYTES + 1, BLOCK_BYTES):
        before = blake2b(before + data[at : at + BLOCK_BYTES], key=key, digest_size=16).digest()
        found.append(int.from_bytes(before[:_HASH_BYTES], "little"))
    return tuple(found)


class _NotUnderstood(Exception):
    """The bytes of a connection cannot be read on."""


class _Parser:
    """One direction of a connection. make: the parser's class; another one goes on after an upgrade."""

    def __init__(self, make: Any, reader: "_Requests | _Answers") -> None:
        self._make, self.reader = make, reader
        self._new()

    def _new(self) -> None:
        self._parser = self.reader.parser = self._make(self.reader)

    def feed(self, data: bytes) -> None:
        """Read bytes. Errors: those of httptools; _NotUnderstood."""
        while data:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                if self.reader.connection.is_tunnel:
                    return
                self._new()  # a request that offers an upgrade, which the server need not accept
            except httptools.HttpParserCallbackError as error:
                raise _NotUnderstood from error
            else:
                return


class _Callbacks(httptools.HTTPProtocol):
    """What a parser may call; most of it says nothing here."""

    def on_message_begin(self) -> None:
        return

    def on_url(self, url: bytes) -> None:
        return

    def on_header(self, name: bytes, value: bytes) -> None:
        return

    def on_headers_complete(self) -> None:
        return

    def on_body(self, body: bytes) -> None:
        return

    def on_message_complete(self) -> None:
        return

    def on_chunk_header(self) -> None:
        return

    def on_chunk_complete(self) -> None:
        return

    def on_status(self, status: bytes) -> None:
        return


class _Requests(_Callbacks, httptools.HTTPProtocol):
    """The callbacks of the parser of requests."""

    parser: Any

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._path = b""
        self._open: _Open | None = None

    def on_message_begin(self) -> None:
        self._path, self._open = b"", None

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_headers_complete(self) -> None:
        self._open = self.connection.begin(self.parser.get_method(), self._path)

    def on_body(self, data: bytes) -> None:
        one = self._open
        if one is not None and one.exchange is not None and len(one.body) + len(data) <= _MAX_BODY:
            one.body += data

    def on_message_complete(self) -> None:
        if self._open is not None:
            self.connection.received(self._open)


class _Answers(_Callbacks, httptools.HTTPProtocol):
    """The callbacks of the parser of answers. lasts_until_end: the present answer ends with the connection."""

    parser: Any

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._start()

    def _start(self) -> None:
        self._status, self.lasts_until_end = 0, False
        self._fields: dict[bytes, bytes] = {}
        self._lines = False
        self.buffer = bytearray()
        self._unpack: Any = None

    def on_message_begin(self) -> None:
        self._start()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields[name.lower()] = value.lower()

    def on_headers_complete(self) -> None:
        self._status = self.parser.get_status_code()
        self.connection.is_tunnel |= self._status == 101
        fields = self._fields
        self.lasts_until_end = b"content-length" not in fields and b"chunked" not in fields.get(
            b"transfer-encoding", b""
        )
        self._lines = b"event-stream" in fields.get(b"content-type", b"") or b"ndjson" in fields.get(
            b"content-type", b""
        )
        if fields.get(b"content-encoding") in (b"gzip", b"deflate"):
            self._unpack = zlib.decompressobj(47)  # either, by its header

    def on_body(self, data: bytes) -> None:
        one = self.connection.answering
        if one is None or one.exchange is None:
            return
        one.exchange.status = self._status
        if self._unpack is not None:
            try:
                data = self._unpack.decompress(data, _MAX_LINE)
            except zlib.error:
                self._unpack = zlib.decompressobj(-15)
                data = b""
        if len(self.buffer) + len(data) > (_MAX_LINE if self._lines else _MAX_BODY):
            self.buffer.clear()
            return
        self.buffer += data
        if self._lines and b"\n" in data:
            *lines, rest = bytes(self.buffer).split(b"\n")
            self.buffer = bytearray(rest)
            for line in lines:
                self._read_line(one, line)

    def _read_line(self, one: _Open, line: bytes) -> None:
        line = line.removeprefix(b"data:").strip()
        if line.startswith(b"{"):
            assert one.exchange is not None
            one.exchange.is_stream = True
            self.connection.note(one, read_part(line))

    def on_message_complete(self) -> None:
        if self._status < 200 and not self.connection.is_tunnel:
            return  # an interim answer: the final one follows
        one = self.connection.answering
        if one is not None and one.exchange is not None and self.buffer:
            part = NO_PART if self._lines else read_part(bytes(self.buffer))
            if self._lines:
                self._read_line(one, bytes(self.buffer))
            else:
                self.connection.note(one, part)
        self.buffer.clear()
        self.connection.answered(self._status)
