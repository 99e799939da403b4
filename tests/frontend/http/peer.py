"""A connection on a transport of the test's, its application, and the loop that turns when a test lets it."""

import asyncio
import contextlib
import weakref
from collections.abc import Coroutine, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

import uvicorn
from uvicorn.server import ServerState

from frontend.http.errors import Headers
from frontend.http.wire.exchange import Exchange, Message, Receive, Send
from frontend.http.wire.held_bodies import HeldBodies
from frontend.http.wire.protocol import Bounds, HttpProtocol

Result = TypeVar("Result")


@contextlib.contextmanager
def turning() -> Iterator[None]:
    """Give all connections of a test a loop, which turns when spin() lets it."""
    with asyncio.Runner() as Peer.runner:
        yield
        for peer in Peer.all:
            if (protocol := peer()) is not None:
                protocol.abandon()
        Peer.all.clear()
        spin()


def spin() -> None:
    """Let all tasks run until they wait."""
    complete(turn())


async def turn() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


def complete(work: Coroutine[Any, Any, Result]) -> Result:
    """Run it in the loop of the test's connections. Runner.run() also handles signals, which takes twice as long."""
    return Peer.runner.get_loop().run_until_complete(work)


class Transport:
    """What a connection asks of asyncio's transport."""

    def __init__(self) -> None:
        self.written, self.calls = b"", list[str]()
        self.num_waiting = self.num_writes = 0

    def write(self, data: bytes) -> None:
        self.num_writes += 1
        assert not {"close", "abort", "write_eof"} & set(self.calls), data
        self.written += data

    def is_closing(self) -> bool:
        return bool({"close", "abort"} & set(self.calls))

    def get_write_buffer_size(self) -> int:
        return self.num_waiting

    def get_extra_info(self, name: str) -> None:
        return None

    def can_write_eof(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return lambda: self.calls.append(name)


class Answering(Exchange):
    """An exchange whose connection goes on behind a whole answer."""

    def write_whole(self, status: int, fields: Headers, body: bytes) -> None:
        super().write_whole(status, fields, body)
        if not Peer.runner.get_loop().is_running():
            spin()


class App:
    """Answers nothing by itself. refused: paths that are refused by their heads."""

    def __init__(self, refused: tuple[str, ...] = ()) -> None:
        self.requests, self._refused = list[Any](), refused

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        exchange, parts = Answering(scope, send, scope["state"]["wire"]), list[bytes]()
        request = SimpleNamespace(path=scope["path"], exchange=exchange, parts=parts, fields=dict(scope["headers"]))
        try:
            if scope["path"] in self._refused:
                self.requests.append(request)
                await exchange.send_whole(404, [], b"refused")
                return
            while not exchange.is_received:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                parts.append(message["body"])
                exchange.is_received = not message["more_body"]
            self.requests.append(request)
            await receive()
        finally:
            scope["state"]["body"].release()


def status(transport: Transport) -> int:
    """The status of the first answer; 0 if nothing was written."""
    return int(transport.written[9:12] or b"0")


class Peer:
    """A connection as its transport calls it; after each call the loop turns."""

    runner: asyncio.Runner
    all: ClassVar[list["weakref.ref[Peer]"]] = []

    def __init__(self, app: App, state: ServerState, bodies: HeldBodies, max_connections: int) -> None:
        async def make() -> HttpProtocol:
            config = uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                proxy_headers=False,
            )
            config.load()
            return HttpProtocol(config, state, Bounds(5000, max_connections), bodies)

        self.protocol = complete(make())
        self.is_lost = False
        self.all.append(weakref.ref(self))

    def abandon(self) -> None:
        """End the connection, so that no task waits for it."""
        if not self.is_lost:
            self.protocol.transport.abort()
            self.connection_lost(None)

    def __getattr__(self, name: str) -> Any:
        async def run(*arguments: Any) -> None:
            self.is_lost |= name == "connection_lost"
            getattr(self.protocol, name)(*arguments)
            await turn()

        def call(*arguments: Any) -> None:
            complete(run(*arguments))

        return call


def connected(
    app: App, others: ServerState | None = None, max_connections: int = 10, bodies: HeldBodies | None = None
) -> tuple[Peer, Transport]:
    peer, transport = Peer(app, others or ServerState(), bodies or HeldBodies(1 << 20), max_connections), Transport()
    peer.connection_made(transport)
    return peer, transport
