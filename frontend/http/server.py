"""The HTTP server of one process: sockets, connections, the tick, and the end.

uvicorn's protocol and request cycle are used, and not its Server: that one cuts streams or waits for them for ever when
it ends, and installs signal handlers of its own.
"""

import asyncio
import contextlib
import gc
import resource
import socket
import time
from collections.abc import Callable, Sequence
from email.utils import formatdate

import uvicorn
from uvicorn.server import ServerState

from frontend.http.app import App
from frontend.http.errors import HttpError
from frontend.http.options import HttpOptions
from frontend.http.protocol import IDLE_S, BoundedProtocol, Bounds, sweep
from frontend.http.service import Service
from frontend.session import EngineHandle

_TICK_S = 1.0
_LAST_BYTES_S = 2.0  # for peers to read the end of their answers
_BACKLOG = 2048


class HttpServer:
    """One server on bound sockets. Made in the event loop that it runs in."""

    def __init__(self, engine: EngineHandle, options: HttpOptions) -> None:
        self.service = Service(engine, options)
        self._drain_s = options.drain_timeout
        self._state = ServerState()
        self._listeners: list[asyncio.Server] = []
        self._stop = asyncio.Event()
        BoundedProtocol.bounds = Bounds(options.max_body_bytes, options.max_connections)
        self._config = uvicorn.Config(
            App(self.service),
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="critical",  # its warnings repeat what a peer sent, for each bad request
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=int(IDLE_S),
        )
        self._config.load()

    async def serve(self, sockets: Sequence[socket.socket], on_ready: Callable[[], None]) -> None:
        """Serve until stop(), then end: see _end()."""
        loop = asyncio.get_running_loop()
        for one in sockets:
            self._listeners.append(await loop.create_server(self._make_protocol, sock=one, backlog=_BACKLOG))
        gc.collect()
        gc.freeze()
        on_ready()
        try:
            while not self._stop.is_set():
                self._tick()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), _TICK_S)
            await self._end()
        finally:
            self.service.pump.close()

    def drain(self) -> None:
        """Take no more requests; let running answers end, at most drain_timeout seconds."""
        self.service.is_draining = True
        self._stop.set()

    def stop(self) -> None:
        """End at once; called after drain(), it ends the wait for running answers."""
        self._drain_s = 0.0
        self.drain()

    def _make_protocol(self) -> BoundedProtocol:
        return BoundedProtocol(config=self._config, server_state=self._state, app_state={})

    def _tick(self) -> None:
        self._state.default_headers = [(b"date", formatdate(time.time(), usegmt=True).encode())]
        self.service.keys.refresh()
        sweep(self._state.connections)

    async def _end(self) -> None:
        """Close the listening sockets; wait for running answers; fail those that are left; close the connections."""
        for listener in self._listeners:
            listener.close()
        begin = time.monotonic()
        while self.service.pump.replies or self._state.tasks:
            if time.monotonic() - begin > self._drain_s:
                break
            self._tick()
            await asyncio.sleep(0.02)
        self.service.pump.fail_all(HttpError(503, "the server is shutting down"), time.monotonic())
        for connection in list(self._state.connections):
            connection.shutdown()
        begin = time.monotonic()
        while self._state.connections and time.monotonic() - begin < _LAST_BYTES_S:
            await asyncio.sleep(0.01)
        for connection in list(self._state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)


def open_engine(address: str) -> EngineHandle:
    """Return a session with the engine at this address. Errors: those of EngineHandle."""
    return EngineHandle(
        None,
        connect=address,
        seed=None,
        tokenizer=None,
        skip_tokenizer=False,
        start_timeout=0.0,
        connect_timeout=10.0,
        client_name="http",
        restart=False,
        options={},
    )


def raise_file_limit() -> int:
    """Raise the limit of open files to what this process may have; return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
