"""The witness: streams, and /health every 20 ms, in a process of its own beside a caller that does harm.

`python -m tests.hostile.work.witness PORT STREAMS TOKENS`: it begins the streams, says "ready", and ends when its
standard input does, with a line of JSON: see Seen.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.frontend.http.caller import ROOT, Caller, environment

_HEALTH_S, _TICK_S = 0.02, 0.005


class Seen(NamedTuple):
    """What the witness saw. Gaps and times: seconds. cut: streams that ended early. wrong: those with other tokens.

    late: the longest time by which the witness itself woke too late. If a machine has more to do than it can, that is a
    part of the gaps which the server has not caused.
    """

    num_streams: int
    cut: int
    wrong: int
    stream_gap: float
    health_gap: float
    num_health: int
    late: float


@contextlib.contextmanager
def witness(caller: Caller, num_streams: int, max_tokens: int) -> Iterator[list[Seen]]:
    """Streams and health checks while the body runs; the list has what was seen once it has ended."""
    arguments = [caller.port, num_streams, max_tokens]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.hostile.work.witness", *map(str, arguments)],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    seen: list[Seen] = []
    try:
        assert process.stdout.readline() == "ready\n"
        yield seen
        said, _ = process.communicate(timeout=60)
        seen.append(Seen(**json.loads(said)))
    finally:
        process.kill()
        process.communicate()


class _Stream:
    """One stream of made-up tokens, which goes on for ever: at its end it begins anew."""

    def __init__(self, port: int, index: int, max_tokens: int) -> None:
        self.longest = 0.0
        self.cut = self.wrong = 0
        self.has_begun = asyncio.Event()
        self._port = port
        body: dict[str, Any] = {"prompt": [3 + index, 7], "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        data = json.dumps(body | {"temperature": 0}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self._request = head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(data) + data
        self._text = ""  # of the first answer

    async def run(self) -> None:
        while True:
            try:
                answer = await self._once()
            except OSError:
                answer = b""
            if b"data: [DONE]" not in answer or b'"error"' in answer:
                self.cut += 1
                return
            text = "".join(map(_text, answer.splitlines()))
            self._text = self._text or text
            self.wrong += text != self._text

    async def _once(self) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        parts = list[bytes]()
        try:
            writer.write(self._request)
            last = time.monotonic()
            while part := await reader.read(1 << 16):
                now = time.monotonic()
                if self.has_begun.is_set():
                    self.longest = max(self.longest, now - last)
                self.has_begun.set()
                last = now
                parts.append(part)
        finally:
            writer.close()
        return b"".join(parts)


def _text(line: bytes) -> str:
    """The text of a line of a stream."""
    if not line.startswith(b"data: {"):
        return ""
    text: str = json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
    return text


async def _ask_health(port: int, times: list[float]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        while True:
            begin = time.monotonic()
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 "), answer
            length = int(answer.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            times.append(time.monotonic() - begin)
            await asyncio.sleep(_HEALTH_S)
    finally:
        writer.close()


async def _note_lateness(lates: list[float]) -> None:
    while True:
        begin = time.monotonic()
        await asyncio.sleep(_TICK_S)
        lates.append(time.monotonic() - begin - _TICK_S)


async def _main(port: int, num_streams: int, max_tokens: int) -> Seen:
    streams = [_Stream(port, index, max_tokens) for index in range(num_streams)]
    tasks = [asyncio.create_task(stream.run()) for stream in streams]
    for stream in streams:
        await asyncio.wait_for(stream.has_begun.wait(), 60)
    for stream in streams:
        stream.longest = 0.0
    times, lates = list[float](), list[float]()
    tasks.append(asyncio.create_task(_note_lateness(lates)))
    health = asyncio.create_task(_ask_health(port, times))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    threading.Thread(target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(stop.set)), daemon=True).start()
    print("ready", flush=True)
    await asyncio.wait([health, asyncio.create_task(stop.wait())], return_when=asyncio.FIRST_COMPLETED)
    has_failed = health.done()
    if has_failed:
        await asyncio.sleep(0.5)  # the streams notice too
    for task in (health, *tasks):
        task.cancel()
    await asyncio.gather(health, *tasks, return_exceptions=True)
    return Seen(
        num_streams,
        sum(stream.cut for stream in streams),
        sum(stream.wrong for stream in streams),
        max(stream.longest for stream in streams),
        float("inf") if has_failed else max(times, default=0.0),
        len(times),
        max(lates, default=0.0),
    )


if __name__ == "__main__":
    result = asyncio.run(_main(*map(int, sys.argv[1:4])))
    print(json.dumps(result._asdict()), flush=True)
