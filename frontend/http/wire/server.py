"""The HTTP server of one process: sockets, connections, the tick, and the end.

For one event loop. frontend/http/wire/protocol.py is a connection, frontend/http/app.py the application.
"""

import asyncio
import contextlib
import gc
import resource
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Sequence
from email.utils import formatdate
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from frontend.http.app import App
from frontend.http.errors import HttpError
from frontend.http.process.options import HttpOptions
from frontend.http.route import Route
from frontend.http.routes import ROUTES
from frontend.http.served import Served
from frontend.http.service import Service
from frontend.http.shared import Shared
from frontend.http.stored.background import resume
from frontend.http.stored.database import Database
from frontend.http.wire.exchange import Message, Receive, Send
from frontend.http.wire.held_bodies import HeldBodies
from frontend.http.wire.listen import close_http
from frontend.http.wire.local_caller import LocalCaller
from frontend.http.wire.protocol import Bounds, HttpProtocol, sweep
from frontend.session import EngineHandle
from frontend.text.known_tokenizers import KnownTokenizers

_TICK_S = 1.0
_LAST_BYTES_S = 2.0  # time for peers to read the end of their answers
_BACKLOG = 2048
_HANDSHAKE_S = 10.0  # of TLS
_MAX_HELD_BYTES = 128 << 20  # bodies of all requests that are not read yet
#: As the engine's (core/process/start.py), a thousand streams that begin bring about no full collections, each of which
#: stops all of them for milliseconds. And most of what a request is made of is gone before a collection looks at it. A
#: middle collection looks at few objects: with a second threshold of 10, those of long lists of log probabilities
#: stopped all streams for 15 to 29 ms.
_GC_THRESHOLDS = 5000, 2, 140


class HttpServer:
    """One server on bound sockets, and the application behind its connections. Created in the event loop that it runs
    in. Errors: ConfigError for a store of responses that cannot be used.
    """

    def __init__(
        self, options: HttpOptions, serve: Callable[[Shared], Served], routes: Sequence[Route] = ROUTES
    ) -> None:
        """serve: returns what is served, given what all of its models share."""
        self.has_cut = False  # running answers were cut when the server stopped
        self._drain_s = options.drain_timeout
        most_of_file = 0 if options.store is None else options.max_file_bytes
        self._bounds = Bounds(options.max_body_bytes, options.max_connections, most_of_file)
        self._bodies = HeldBodies(max(_MAX_HELD_BYTES, 2 * options.max_body_bytes))
        self._config = _uvicorn_config(self, options)
        self._state = ServerState()
        self._num_collected = 0  # requests before the last collection of garbage
        self._listeners: list[asyncio.Server] = []
        self._stop = asyncio.Event()
        self._store = _open_store(options)
        self._routes = routes
        self._shared = Shared(options, self._store)
        self.served = serve(self._shared)
        self._app = App(self.served, self._routes)

    def __call__(self, scope: Message, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        """Answer one request, as ASGI has it."""
        return self._app(scope, receive, send)

    def adopt(self, serve: Callable[[Shared], Served]) -> None:
        """Serve another engine from now on, instead of one that is gone. Connections stay open."""
        self.served.close()
        self._shared.runs.close()
        self.served = serve(self._shared)
        self._app = App(self.served, self._routes)
        self._resuming = asyncio.get_running_loop().create_task(self._resume())

    async def _resume(self) -> None:
        await resume(self.served)

    async def serve(
        self, sockets: Sequence[socket.socket], on_ready: Callable[[], None], on_turn: Callable[[], None] = lambda: None
    ) -> None:
        """Serve until stop(), then end: see _end(). on_turn: called once a second, which shows that the loop turns."""
        await self._resume()
        if self._shared.batches is not None:
            await self._shared.batches.start(LocalCaller(self).post, self._num_lines, self._has_room)
        for one in sockets:
            self._listeners.append(await self._listen(one))
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        self._tick()
        on_ready()
        try:
            while not self._stop.is_set():
                on_turn()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), _TICK_S)
                self._tick()
            await self._end(sockets, on_turn)
        finally:
            if self._shared.batches is not None:
                await self._shared.batches.close()
            self.served.close()
            self._shared.close()
            if self._store is not None:
                self._store.close()

    def _num_lines(self) -> int:
        """Return how many requests of batches may run."""
        given = self._shared.options.batch_requests
        rows = [service.engine.client.welcome.limits.max_num_seqs for service in self.served.services]
        return given or max(1, min(rows, default=1) // 2)

    async def _has_room(self) -> bool:
        """Return whether no request waits in an engine, as far as is known."""
        read = [(await service.statistics.read())[0] for service in self.served.services]
        return not any(one is not None and one.num_waiting for one in read)

    async def _listen(self, bound: socket.socket) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        listen: Any = loop.create_unix_server if bound.family == socket.AF_UNIX else loop.create_server
        handshake_s = None if self._config.ssl is None else _HANDSHAKE_S
        server: asyncio.Server = await listen(
            self._make_protocol,
            sock=bound,
            backlog=_BACKLOG,
            ssl=self._config.ssl,
            ssl_handshake_timeout=handshake_s,
        )
        return server

    def drain(self) -> None:
        """Accept no more requests; let running answers end, at most drain_timeout seconds."""
        self._shared.is_draining = True
        self._stop.set()

    def stop(self) -> None:
        """Stop at once; after drain(), this ends the wait for running answers."""
        self._drain_s = 0.0
        self.drain()

    @property
    def is_draining(self) -> bool:
        """Return whether drain() or stop() was called."""
        return self._stop.is_set()

    @property
    def _is_answering(self) -> bool:
        return not self._app.is_idle or any(service.pump.replies for service in self.served.services)

    def _make_protocol(self) -> HttpProtocol:
        return HttpProtocol(self._config, self._state, self._bounds, self._bodies)

    def _tick(self) -> None:
        self._state.default_headers = [(b"date", formatdate(time.time(), usegmt=True).encode())]
        self._shared.keys.refresh()
        sweep(self._connections)
        self._give_back()
        for service in self.served.services:
            service.standing.ask()

    def _give_back(self) -> None:
        """Return freed memory to the system. As soon as no request is being answered, also collect all garbage, once:
        both take a few milliseconds.
        """
        freed, num_requests = self._shared.turns.freed, self._state.total_requests
        if self._num_collected == num_requests or self._is_answering:
            freed.give_back()
            return
        self._num_collected = num_requests
        gc.collect()
        freed.give_back(0)

    @property
    def _connections(self) -> "set[HttpProtocol]":
        return self._state.connections  # type: ignore[return-value]

    async def _end(self, sockets: Sequence[socket.socket], on_turn: Callable[[], None]) -> None:
        """Wait for running answers; fail the remaining ones; close the sockets and the connections.

        During that, new connections are answered with 503. Then the sockets refuse them, including those that another
        process has open: a connection in its backlog would hang.
        """
        begin = ticked = time.monotonic()
        while self._is_answering and time.monotonic() - begin < self._drain_s:
            if time.monotonic() - ticked > _TICK_S:
                ticked = time.monotonic()
                self._tick()
                on_turn()
            await asyncio.sleep(0.02)
        for listener, one in zip(self._listeners, sockets, strict=True):
            one = one.dup()  # the listener closes its own
            listener.close()
            with one:
                close_http(one)
        self.has_cut = self._is_answering
        for service in self.served.services:
            service.pump.fail_all(HttpError(503, "the server is shutting down"), time.monotonic())
        for connection in list(self._connections):
            connection.shutdown()
        begin = time.monotonic()
        while self._connections and time.monotonic() - begin < _LAST_BYTES_S:
            await asyncio.sleep(0.01)
        for connection in list(self._connections):
            connection.transport.abort()
        await asyncio.sleep(0)


def _open_store(options: HttpOptions) -> Database | None:
    """Return the store that the options name. Errors: ConfigError."""
    return None if options.store is None else Database(options.store, options.store_bytes, options.store_days)


def _uvicorn_config(app: HttpServer, options: HttpOptions) -> uvicorn.Config:
    """Return the configuration of uvicorn's connections. Its logs are not configured: the server has its own."""
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=bool(options.forwarded_allow_ips),
        forwarded_allow_ips=list(options.forwarded_allow_ips),
        root_path=options.root_path,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
        ssl_ca_certs=options.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_NONE if options.ssl_ca_certs is None else ssl.CERT_REQUIRED,
    )
    config.load()
    return config


def one_model(engine: EngineHandle, options: HttpOptions) -> Callable[[Shared], Service]:
    """Return what HttpServer needs to serve the model of this engine."""
    return lambda shared: Service(engine, options, shared)


def open_engine(
    address: str,
    client_name: str = "http",
    chat_template: str | None = None,
    known: KnownTokenizers | None = None,
) -> EngineHandle:
    """Return a session with the engine at this address. chat_template: instead of the engine's. known: of earlier ones.

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
        known=known,
    )


def raise_file_limit() -> int:
    """Raise the limit of open files to this process's maximum; return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
