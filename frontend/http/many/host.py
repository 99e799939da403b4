"""ModelHost: owns the engines of many models. It starts and ends them when the HTTP worker says so.

The worker decides (frontend/http/many/residents.py), because it knows which requests run. The host survives it: the
next worker is told which engines run, and their requests continue. For one event loop.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from frontend.engine.supervised_engine import SupervisedEngine
from frontend.http.many.catalog import Catalog, Entry
from frontend.http.many.changes import Changes
from frontend.http.many.messages import (
    MAX_LINE_BYTES,
    Begin,
    Card,
    Change,
    End,
    Ended,
    Known,
    Progress,
    Ready,
    ToHost,
    ToWorker,
)
from ipc.errors import ConfigError, EngineCoreError

_END_S = 10.0  # for an idle engine to end by itself
_LOOK_S = 0.02
_MAX_THREADS = 64
_decoder = msgspec.json.Decoder(ToHost)
_encode = msgspec.json.Encoder().encode


class _Running:
    """One engine. address: "" while it loads."""

    def __init__(self, engine: SupervisedEngine) -> None:
        self.engine, self.address, self.is_ending = engine, "", False


class ModelHost:
    """See the module's docstring. memory: bytes for all models. card_of: reads what a model needs. make_engine: returns
    its engine, not started; called on a thread. on_news: called with a line for each event.
    """

    def __init__(
        self,
        catalog: Catalog,
        memory: int,
        *,
        card_of: Callable[[Entry], Card],
        make_engine: Callable[[Entry, Card], SupervisedEngine],
        on_news: Callable[[str], None],
    ) -> None:
        self._catalog, self._memory = catalog, memory
        self._card_of, self._make_engine, self._tell = card_of, make_engine, on_news
        self._changes = Changes(catalog)
        self._cards = {name: card_of(entry) for name, entry in catalog.by_name.items()}
        self._running: dict[str, _Running] = {}
        self._changing: set[str] = set()  # names that a change is about: none of them begins to load
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(_MAX_THREADS, "model-host")
        self._server: asyncio.Server | None = None
        self._is_closing = False

    @property
    def cards(self) -> dict[str, Card]:
        """Return what is known of each model."""
        return self._cards

    async def listen(self, path: str) -> None:
        """Accept workers at this Unix socket, in a folder that only this user can open."""
        self._server = await asyncio.start_unix_server(self._serve, path, limit=MAX_LINE_BYTES)

    async def close(self) -> None:
        """End all engines."""
        self._is_closing = True
        if self._server is not None:
            self._server.close()
        for name, one in list(self._running.items()):
            self._end(name, one)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                while self._running:
                    await asyncio.sleep(_LOOK_S)
        for one in self._running.values():
            one.engine.close(0)
        for writer in self._writers:
            writer.close()
        for task in self._tasks:
            task.cancel()
        self._threads.shutdown(wait=False)

    # --- the worker ---

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self._send(self._known())
        try:
            while line := await reader.readline():
                self._take(_decoder.decode(line))
        except ConnectionError:
            return
        finally:
            self._writers.discard(writer)
            writer.close()

    def _known(self) -> Known:
        running = {name: one.address for name, one in self._running.items() if not one.is_ending}
        return Known(tuple(self._cards.values()), self._memory, running)

    def _send(self, message: ToWorker) -> None:
        for writer in self._writers:
            writer.write(_encode(message) + b"\n")

    def _take(self, message: ToHost) -> None:
        match message:
            case Begin(name):
                self._spawn(self._begin(name))
            case End(name):
                one = self._running.get(name)
                if one is None:
                    self._send(Ended(name))
                else:
                    self._end(name, one)
            case Change():
                self._spawn(self._change(message))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- engines ---

    async def _begin(self, name: str) -> None:
        """Start a model's engine, and send how that ended."""
        while name in self._changing:
            await asyncio.sleep(_LOOK_S)
        loop, entry, card = asyncio.get_running_loop(), self._catalog.by_name.get(name), self._cards.get(name)
        if entry is None or card is None or card.problem or self._is_closing:
            self._send(Ended(name, card.problem if card is not None else f"there is no model {name!r}"))
            return
        while (known := self._running.get(name)) is not None:
            if known.is_ending:
                await asyncio.sleep(_LOOK_S)
                continue
            if known.address:
                self._send(Ready(name, known.address))
            return
        self._tell(f"loading {name}")
        try:
            one = self._running[name] = _Running(self._make_engine(entry, card))
        except (EngineCoreError, OSError) as error:  # such as no folder for its socket
            self._send(Ended(name, str(error)))
            return

        def start() -> None:
            one.engine.start()
            one.engine.wait_ready()

        try:
            await loop.run_in_executor(self._threads, start)
        except (EngineCoreError, OSError) as error:
            await loop.run_in_executor(self._threads, one.engine.close)
            self._forget(name, str(error))
            return
        one.address = one.engine.address
        loop.add_reader(one.engine.ended_fd, self._on_ended, name, one)
        if one.is_ending:
            one.engine.drain()
            return
        self._tell(f"{name} is loaded")
        self._send(Ready(name, one.address))

    def _end(self, name: str, one: _Running) -> None:
        """Let an engine end: it finishes what it does, and keeps its KV blocks if it has a folder for them."""
        one.is_ending = True
        if one.address:
            one.engine.drain()
            asyncio.get_running_loop().call_later(_END_S, self._end_late, name, one)

    def _end_late(self, name: str, one: _Running) -> None:
        if self._running.get(name) is one:
            one.engine.drain()  # the second time it stops at once

    def _on_ended(self, name: str, one: _Running) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(one.engine.ended_fd)
        text = "" if one.is_ending else one.engine.describe_end()

        async def close() -> None:
            await loop.run_in_executor(self._threads, one.engine.close)
            self._forget(name, text)

        self._spawn(close())

    def _forget(self, name: str, text: str) -> None:
        del self._running[name]
        self._tell(f"{name} is unloaded" + (f": {text}" if text else ""))
        self._send(Ended(name, text))

    # --- changes ---

    async def _change(self, change: Change) -> None:
        """Change the models, and send each step of it."""
        loop = asyncio.get_running_loop()

        def tell(line: dict[str, Any]) -> None:
            loop.call_soon_threadsafe(self._send, Progress(change.id, line))

        try:
            if change.kind != "pull" and change.name in self._running:
                raise ConfigError(f"{change.name!r} is loaded: unload it first, with `engine-core stop`")
            if change.name in self._changing:
                raise ConfigError(f"{change.name!r} is being changed already: wait until that has ended")
            self._changing.add(change.name)
            try:
                await loop.run_in_executor(self._threads, self._changes.make, change, tell)
            finally:
                self._changing.discard(change.name)
            entries = self._catalog.by_name
            self._cards = {name: self._cards.get(name) or self._card_of(entry) for name, entry in entries.items()}
            if change.kind == "pull":  # its files may be others
                self._cards |= {one: self._card_of(entries[one]) for one in self._changes.served_as(change.name)}
        except (EngineCoreError, OSError) as error:
            self._send(Progress(change.id, {}, is_final=True, error=str(error)))
            return
        self._send(self._known())
        self._send(Progress(change.id, {"status": "success"}, is_final=True))
