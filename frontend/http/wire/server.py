"""The HTTP server of one process: sockets, connections, the tick, and the end.

Made for one event loop. frontend/http/wire/protocol.py is a connection, frontend/http/app.py what answers.
"""

import asyncio
import contextlib
import gc
import resource
import socket
import time
from collections.abc import Callable, Sequence

from frontend.http.app import App
from frontend.http.errors import HttpError
from frontend.http.process.options import HttpOptions
from frontend.http.service import Service
from frontend.http.wire.head import Heads
from frontend.http.wire.protocol import Bounds, HttpProtocol, sweep
from frontend.session import EngineHandle

_TICK_S = 1.0
_LAST_BYTES_S = 2.0  # for peers to read the end of their answers
_BACKLOG = 2048
#: As the engine's (core/process/start.py): a thousand streams that begin bring about no full collections, each of which
#: stops all of them for milliseconds.
_GC_THRESHOLDS = 700, 10, 200


class HttpServer:
    """One server on bound sockets. Made in the event loop that it runs in."""

    def __init__(self, engine: EngineHandle, options: HttpOptions) -> None:
        self.service = Service(engine, options)
        self._drain_s = options.drain_timeout
        self._app = App(self.service)
        self._bounds = Bounds(options.max_body_bytes, options.max_connections)
        self._heads = Heads()
        self._connections: dict[HttpProtocol, None] = {}
        self._listeners: list[asyncio.Server] = []
        self._stop = asyncio.Event()

    async def serve(
        self, sockets: Sequence[socket.socket], on_ready: Callable[[], None], on_turn: Callable[[], None] = lambda: None
    ) -> None:
        """Serve until stop(), then end: see _end(). on_turn: called once a second, which shows that the loop turns."""
        loop = asyncio.get_running_loop()
        for one in sockets:
            self._listeners.append(await loop.create_server(self._make_protocol, sock=one, backlog=_BACKLOG))
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        on_ready()
        try:
            while not self._stop.is_set():
                self._tick()
                on_turn()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), _TICK_S)
            await self._end()
        finally:
            self.service.pump.close()
            if self.service.spans is not None:
                self.service.spans.close()

    def drain(self) -> None:
        """Take no more requests; let running answers end, at most drain_timeout seconds."""
        self.service.is_draining = True
        self._stop.set()

    def stop(self) -> None:
        """End at once; called after drain(), it ends the wait for running answers."""
        self._drain_s = 0.0
        self.drain()

    def _make_protocol(self) -> HttpProtocol:
        return HttpProtocol(self._app, self._bounds, self._heads, self._connections)

    def _tick(self) -> None:
        self._heads.tick()
        self.service.keys.refresh()
        sweep(self._connections)

    async def _end(self) -> None:
        """Close the listening sockets; wait for running answers; fail those that are left; close the connections."""
        for listener in self._listeners:
            listener.close()
        begin = time.monotonic()
        while self.service.pump.replies or not self._app.is_idle:
            if time.monotonic() - begin > self._drain_s:
                break
            self._tick()
            await asyncio.sleep(0.02)
        self.service.pump.fail_all(HttpError(503, "the server is shutting down"), time.monotonic())
        for connection in list(self._connections):
            connection.shutdown()
        begin = time.monotonic()
        while self._connections and time.monotonic() - begin < _LAST_BYTES_S:
            await asyncio.sleep(0.01)
        for connection in list(self._connections):
            connection.transport.abort()
        await asyncio.sleep(0)


def open_engine(address: str, client_name: str = "http", chat_template: str | None = None) -> EngineHandle:
    """Return a session with the engine at this address. chat_template: in place of the engine's.

    Errors: those of EngineHandle.
    """
    return EngineHandle(
        None,
        connect=address,
        seed=None,
        tokenizer=None,
        skip_tokenizer=False,
        start_timeout=0.0,
        connect_timeout=10.0,
        client_name=client_name,
        restart=False,
        options={"chat_template": chat_template},
    )


def raise_file_limit() -> int:
    """Raise the limit of open files to what this process may have; return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
