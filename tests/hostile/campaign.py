"""All campaigns at once against one server, in a process of its own: what hostile callers send, over and over.

`python -m tests.hostile.campaign PORT SECONDS`: it begins, says "ready", and ends after that time, or when its standard
input does, with a line of JSON: for each kind of harm, the number of each outcome. An outcome is a status, "reset" (the
server closed the connection without an answer) or what the caller itself did.
"""

import asyncio
import contextlib
import json
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from tests.hostile.work.requests import harms

#: Keys of the hostile callers: tenants without limits, and one that may ask once a minute.
HOSTILE_KEYS, SPENT_KEY = ("harm0", "harm1", "harm2"), "spent"
_BODY_BYTES = 7 << 20
_STREAM: dict[str, Any] = {
    "prompt": [5, 6, 7],
    "max_tokens": 2000,
    "temperature": 0,
    "stream": True,
    "ignore_eos": True,
}
_RUBBISH = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),  # TLS to a server without it
    b"GET / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 70_000,
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n",
    b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 200,
    b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n" + b"1;x\r\nx\r\n" * 9000,
    b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n" * 60,
    b"\r\n" * 40_000,
)


class Campaigns:
    """The hostile callers of one server. counts: outcomes by kind of harm."""

    def __init__(self, port: int) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self._port = port
        self._random = random.Random(port)
        self._harms = [(harm.name, _request(harm.path, harm.body, "%s")) for harm in harms(8)]

    async def run(self) -> None:
        """Do harm for ever."""
        kinds: list[tuple[int, Callable[[int], Coroutine[Any, Any, None]]]] = [
            (len(HOSTILE_KEYS), self._work), (40, self._slow_head), (40, self._slow_body), (16, self._hoard),
            (4, self._flood), (16, self._deaf), (6, self._leave), (2, self._rubbish), (2, self._look),
        ]  # fmt: skip
        async with asyncio.TaskGroup() as group:
            for count, kind in kinds:
                for index in range(count):
                    group.create_task(self._again(kind, index))

    async def _again(self, kind: Callable[[int], Coroutine[Any, Any, None]], index: int) -> None:
        await asyncio.sleep(self._random.random())
        while True:
            try:
                await kind(index)
            except (OSError, asyncio.IncompleteReadError):  # the server may cut off whoever does harm
                self._note(kind.__name__.strip("_").replace("_", " "), "reset")
                await asyncio.sleep(0.05)

    def _note(self, kind: str, outcome: str) -> None:
        self.counts.setdefault(kind, Counter())[outcome] += 1

    @contextlib.asynccontextmanager
    async def _peer(self) -> Any:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def _work(self, index: int) -> None:
        """Requests that are expensive to answer, one after another, in an order of its own."""
        order = self._random.sample(self._harms, len(self._harms))
        for name, request in order:
            async with self._peer() as (reader, writer):
                try:
                    writer.write(request.replace(b"Bearer %s", b"Bearer " + HOSTILE_KEYS[index].encode(), 1))
                    await writer.drain()
                    self._note(name, await _status(reader))
                    while await reader.read(1 << 18):
                        continue
                except OSError:
                    self._note(name, "reset")

    async def _slow_head(self, index: int) -> None:
        """A head of which a byte comes now and then."""
        async with self._peer() as (reader, writer):
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx: ")
            self._note("slow head", await self._drip(reader, writer, 0.5))

    async def _slow_body(self, index: int) -> None:
        """A body of which a byte comes now and then."""
        async with self._peer() as (reader, writer):
            writer.write(_head("/v1/completions", 1 << 20, HOSTILE_KEYS[index % 3]) + b" " * 1000)
            self._note("slow body", await self._drip(reader, writer, 0.5))

    async def _drip(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> str:
        """Send a byte each `seconds` until there is an answer, whose status is returned."""
        answer = asyncio.ensure_future(_status(reader))
        try:
            while not (await asyncio.wait([answer], timeout=seconds))[0]:
                writer.write(b" ")
            return answer.result()
        finally:
            answer.cancel()

    async def _hoard(self, index: int) -> None:
        """A large body without its last byte, kept for a while."""
        async with self._peer() as (reader, writer):
            writer.write(_head("/v1/completions", _BODY_BYTES + 1, HOSTILE_KEYS[index % 3]))
            writer.write(bytes(_BODY_BYTES))
            self._note("hoard", await self._within(8, reader))

    async def _within(self, seconds: float, reader: asyncio.StreamReader) -> str:
        try:
            return await asyncio.wait_for(_status(reader), seconds)
        except TimeoutError:
            return "left"

    async def _flood(self, index: int) -> None:
        """Large bodies of a key out of quota, on one connection."""
        async with self._peer() as (reader, writer):
            for _ in range(20):
                writer.write(_head("/v1/completions", _BODY_BYTES, SPENT_KEY) + bytes(_BODY_BYTES))
                await writer.drain()
                self._note("flood", await _status(reader, whole=True))

    async def _deaf(self, index: int) -> None:
        """A stream of log probabilities that is not read."""
        async with self._peer() as (_, writer):
            writer.transport.pause_reading()
            writer.write(_request("/v1/completions", _STREAM | {"logprobs": 5}, HOSTILE_KEYS[index % 3]))
            await asyncio.sleep(10 + self._random.random())
            self._note("deaf", "left")

    async def _leave(self, index: int) -> None:
        """A stream that is left as soon as it begins, and a request that is left before its answer."""
        async with self._peer() as (reader, writer):
            writer.write(_request("/v1/completions", _STREAM | {"n": 8, "temperature": 1}, HOSTILE_KEYS[index % 3]))
            if self._random.random() < 0.5:
                await self._within(20, reader)
            await asyncio.sleep(self._random.random() / 5)
            self._note("leave", "left")

    async def _rubbish(self, index: int) -> None:
        """What is not proper HTTP."""
        await asyncio.sleep(0.1)
        async with self._peer() as (reader, writer):
            writer.write(self._random.choice(_RUBBISH))
            self._note("rubbish", await self._within(1, reader))

    async def _look(self, index: int) -> None:
        """Pages that are made for each request."""
        await asyncio.sleep(0.02)
        async with self._peer() as (reader, writer):
            path = self._random.choice(("/metrics", "/openapi.json", "/v1/load", "/slots", "/tokenizer_info", "/props"))
            writer.write(_head(path, 0, HOSTILE_KEYS[0], method="GET"))
            self._note("look", await _status(reader, whole=True))


def _head(path: str, size: int, key: str, *, method: str = "POST") -> bytes:
    lines = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\ncontent-length: {size}"
    return f"{lines}\r\ncontent-type: application/json\r\n\r\n".encode()


def _request(path: str, body: dict[str, Any], key: str) -> bytes:
    """A request whose connection ends with its answer."""
    data = json.dumps(body).encode()
    return _head(path, len(data), key).replace(b"\r\n", b"\r\nconnection: close\r\n", 1) + data


async def _status(reader: asyncio.StreamReader, *, whole: bool = False) -> str:
    """The status of the next answer. whole: read its body too, which has a length."""
    head = await reader.readuntil(b"\r\n\r\n")
    if whole:
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
    return head.split(b" ", 2)[1].decode()


async def _main(port: int, seconds: float) -> dict[str, Counter[str]]:
    campaigns, stop, loop = Campaigns(port), asyncio.Event(), asyncio.get_running_loop()
    threading.Thread(target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(stop.set)), daemon=True).start()
    print("ready", flush=True)
    task = asyncio.create_task(campaigns.run())
    ends = [task, asyncio.create_task(stop.wait())]
    await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    for one in ends:
        one.cancel()
    await asyncio.gather(*ends, return_exceptions=True)
    return campaigns.counts


if __name__ == "__main__":
    result = asyncio.run(_main(int(sys.argv[1]), float(sys.argv[2])))
    print(json.dumps(result), flush=True)
