"""Follower: a program's copy of the prefix cache, kept by the events of its session and compared with the engine's."""

import contextlib
from functools import partial
from typing import Protocol

import numpy as np

from frontend.client.client import EngineClient
from frontend.client.kv_event_stream import KVEventStream
from ipc.errors import CallFailedError, EngineDeadError
from ipc.wire.kv_events import KVBlocksCleared, KVBlocksRemoved, KVBlocksStored
from ipc.wire.scheduling_messages import KVEvents
from tests.simulation.engine_process import EngineProcess
from tests.simulation.world import Failure, World

_Block = tuple[int, bytes]  # parent's content number, token ids


class Host(Protocol):
    """The process that a follower belongs to."""

    def when_running(self, do: "partial[None]") -> None:
        """Call it now, or when the process goes on."""


class Follower:
    """The copy of one client. It follows from its beginning on."""

    def __init__(self, world: World, host: Host, client: EngineClient, name: str) -> None:
        self._world = world
        self._host = host
        self._name = name
        self._blocks: dict[int, _Block] | None = None  # by content number; None: a snapshot is due
        self._due = 0  # sequence number
        self._is_reading = False
        self._stream = client._kv_events = KVEventStream(client)  # follow_kv_events() would wait for the answer
        self._stream.set_listener(self._read_later)
        with contextlib.suppress(CallFailedError):  # the answer takes time, which the played call does not have
            client.begin_kv_events()

    def check_against(self, engine: EngineProcess) -> bool:
        """Compare the copy with the cache of an idle engine that has no other follower; False while messages are on
        their way. Errors: Failure."""
        if self._blocks is None or self._is_reading or list(engine.core.kv_feed._sequences.values()) != [self._due]:
            return False
        contents, parents, token_ids = engine.core.scheduler.pool.names.columns()
        rows = zip(contents.tolist(), parents.tolist(), token_ids, strict=True)
        cached = {content: (parent, np.asarray(ids, "<i4").tobytes()) for content, parent, ids in rows}
        if self._blocks != cached:
            differing = sorted(number for number, _ in self._blocks.items() ^ cached.items())
            raise Failure(f"the copy of {self._name} differs from the prefix cache in the contents {differing}")
        self._world.count("cache copied")
        return True

    def _read_later(self) -> None:
        if not self._is_reading:
            self._is_reading = True
            self._world.after(self._world.delay() // 4, partial(self._host.when_running, partial(self._read)))

    def _read(self) -> None:
        self._is_reading = False
        while True:
            if self._stream.is_broken:
                self._blocks = None
                self._world.count("cache followed too slowly")
            try:
                message = self._stream.get(timeout=0.0)
            except (CallFailedError, EngineDeadError):
                return  # a new snapshot is asked for, or the session is over
            if message is None:
                return
            self._apply(message)

    def _apply(self, message: KVEvents) -> None:
        is_new = bool(message.events) and isinstance(message.events[0], KVBlocksCleared)
        if message.sequence != self._due and not is_new:
            self._blocks = None
        self._due = message.sequence + 1
        if self._blocks is None and not is_new:
            return
        for event in message.events:
            match event:
                case KVBlocksCleared():
                    self._blocks = {}
                case KVBlocksStored():
                    self._store(event)
                case KVBlocksRemoved(contents):
                    for content in np.frombuffer(contents, "<i8").tolist():
                        self._remove(content)
        if message.gap:
            self._blocks = None
            self._world.count("gap in the events")

    def _store(self, event: KVBlocksStored) -> None:
        assert self._blocks is not None
        contents, parents = (np.frombuffer(column, "<i8").tolist() for column in (event.contents, event.parents))
        size = 4 * event.block_size
        for at, (content, parent) in enumerate(zip(contents, parents, strict=True)):
            if content in self._blocks:
                raise Failure(f"{self._name} is told twice that content {content} was stored")
            self._blocks[content] = (parent, event.token_ids[size * at : size * (at + 1)])

    def _remove(self, content: int) -> None:
        assert self._blocks is not None
        if self._blocks.pop(content, None) is None:
            raise Failure(f"{self._name} is told that content {content} was removed, which was not stored")
