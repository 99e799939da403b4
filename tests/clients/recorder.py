"""Recorder: a forwarder in front of a server that notes the requests which its clients send."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any


class Recorder:
    """A forwarder to `127.0.0.1:port` in a thread of its own; `requests()` returns what passed since the last call."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._sent: list[bytearray] = []  # bytes of clients, one entry a connection
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        threading.Thread(target=self._serve, args=(ready,), daemon=True).start()
        ready.wait()

    def _serve(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._forward, "127.0.0.1", 0))
        self.port: int = server.sockets[0].getsockname()[1]
        ready.set()
        self._loop.run_forever()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kept = bytearray()
        self._sent.append(kept)
        upstream, sink = await asyncio.open_connection("127.0.0.1", self._target)
        await asyncio.gather(_copy(reader, sink, kept), _copy(upstream, writer, None))

    def requests(self) -> list[str]:
        """Return the requests since the last call, each once: method, path, names of headers and of body fields."""
        sent, self._sent = self._sent, []
        return sorted({line for kept in sent for line in _read(bytes(kept))})


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter, kept: bytearray | None) -> None:
    try:
        while data := await source.read(65536):
            if kept is not None:
                kept += data
            sink.write(data)
            await sink.drain()
    except ConnectionError:
        pass
    finally:
        sink.close()


def _read(data: bytes) -> Iterator[str]:
    """Yield a line for each request of a connection."""
    while b"\r\n\r\n" in data:
        head, _, data = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines if ": " in line)
        lower = {name.lower(): value for name, value in headers.items()}
        length = int(lower.get("content-length", 0))
        body, data = data[:length], data[length:]
        fields = ", ".join(sorted(_json(body)))
        own = sorted(name for name in lower if name.startswith("x-") or name in ("accept", "user-agent"))
        yield f"{first.removesuffix(' HTTP/1.1')}  fields: {fields or '-'}  headers: {', '.join(own)}"


def _json(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body or b"{}")
    except ValueError:
        return {"(not JSON)": None}
    return value if isinstance(value, dict) else {"(not an object)": None}
