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
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import uvloop

from tests.frontend.http.caller import ROOT, Caller, environment

_HEALTH_S, _TICK_S = 0.02, 0.005


class Seen(NamedTuple):
    """What the witness saw. Gaps and times: seconds. cut: streams that ended early. wrong: those with other tokens.

    stream_gap, health_gap: the longest. server_stream_gap, server_health_gap: the longest without the time in which the
    witness itself could not look, because it got no core or was busy. The server is never credited with more than that
    very time: a gap that goes on when the witness looks again is the server's.
    first: the longest wait for the first token of a stream that begins, which is in no gap: it waits for its turn.
    late: the longest time by which the witness woke too late.
    """

    num_streams: int
    cut: int
    wrong: int
    stream_gap: float
    server_stream_gap: float
    health_gap: float
    server_health_gap: float
    num_health: int
    first: float
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


class _Gaps:
    """The longest waits, in all and without those times in which the witness could not look."""

    def __init__(self, absences: "_Absences") -> None:
        self.longest = self.of_server = 0.0
        self._absences = absences

    def note(self, begin: float, end: float) -> None:
        """Note a wait. Times: monotonic seconds."""
        self.longest = max(self.longest, end - begin)
        if end - begin > self.of_server:
            self.of_server = max(self.of_server, end - begin - self._absences.within(begin, end))


class _Absences:
    """The times in which the witness did not run although it should have."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._due = time.monotonic()  # when it is to look next
        self._last = deque[tuple[float, float]](maxlen=1000)

    def within(self, begin: float, end: float) -> float:
        """Return how much of a time it was absent; it may be absent up to now."""
        times = [*self._last, (self._due, time.monotonic())]
        return sum(max(0.0, min(end, until) - max(begin, since)) for since, until in times)

    async def watch(self) -> None:
        """Look every _TICK_S."""
        while True:
            self._due = time.monotonic() + _TICK_S
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            self.longest = max(self.longest, now - self._due)
            if now - self._due > _TICK_S:
                self._last.append((self._due, now))


class _Stream:
    """One stream of made-up tokens, which goes on for ever: at its end it begins again."""

    def __init__(self, port: int, index: int, max_tokens: int, absences: _Absences) -> None:
        self.gaps, self.firsts, self._absences = _Gaps(absences), _Gaps(absences), absences
        self.cut = self.wrong = 0
        self.has_begun = asyncio.Event()
        self._port = port
        # They end one after the other: 64 that begin again at once are more than the witness does in a moment.
        body: dict[str, Any] = {"prompt": [3 + index, 7], "max_tokens": max_tokens + index, "stream": True}
        data = json.dumps(body | {"ignore_eos": True, "temperature": 0}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self._request = head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(data) + data
        self._text = b""  # of the first answer

    def begin(self) -> None:
        """Count gaps from now on."""
        self.gaps, self.firsts = _Gaps(self._absences), _Gaps(self._absences)

    async def run(self) -> None:
        while True:
            try:
                text, is_whole = await self._once()
            except OSError:
                text, is_whole = b"", False
            if not is_whole:
                self.cut += 1
                return
            self._text = self._text or text
            self.wrong += text != self._text

    async def _once(self) -> tuple[bytes, bool]:
        """Return the text of an answer, as JSON has it, and whether it is complete."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        texts, rest, is_whole, has_failed = list[bytes](), b"", False, False
        try:
            writer.write(self._request)
            last, gaps = time.monotonic(), self.firsts
            while part := await reader.read(1 << 16):
                now = time.monotonic()
                if gaps is self.firsts and b"data: " not in part:
                    continue  # headers alone
                gaps.note(last, now)
                self.has_begun.set()
                last, gaps = now, self.gaps
                *lines, rest = (rest + part).split(b"\n")  # read as they come, so no end takes long
                texts += [line.partition(b'"text":"')[2].partition(b'","logprobs":')[0] for line in lines]
                is_whole = is_whole or b"data: [DONE]" in b"\n".join(lines)
                has_failed = has_failed or b'"error"' in part
        finally:
            writer.close()
        return b"".join(texts), is_whole and not has_failed


async def _ask_health(port: int, gaps: _Gaps, times: list[float]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        while True:
            begin = time.monotonic()
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 "), answer
            length = int(answer.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            now = time.monotonic()
            gaps.note(begin, now)
            times.append(now - begin)
            await asyncio.sleep(_HEALTH_S)
    finally:
        writer.close()


async def _main(port: int, num_streams: int, max_tokens: int) -> Seen:
    absences = _Absences()
    tasks = [asyncio.create_task(absences.watch())]
    streams = [_Stream(port, index, max_tokens, absences) for index in range(num_streams)]
    tasks += [asyncio.create_task(stream.run()) for stream in streams]
    for stream in streams:
        await asyncio.wait_for(stream.has_begun.wait(), 60)
    for stream in streams:
        stream.begin()
    absences.longest = 0.0
    times, gaps = list[float](), _Gaps(absences)
    health = asyncio.create_task(_ask_health(port, gaps, times))
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
        max(stream.gaps.longest for stream in streams),
        max(stream.gaps.of_server for stream in streams),
        float("inf") if has_failed else gaps.longest,
        float("inf") if has_failed else gaps.of_server,
        len(times),
        max(stream.firsts.longest for stream in streams),
        absences.longest,
    )


if __name__ == "__main__":
    result = uvloop.run(_main(*map(int, sys.argv[1:4])))  # a third of asyncio's work for an event
    print(json.dumps(result._asdict()), flush=True)
