"""PeerServer: sends KV blocks to other engines that ask for them by name, from memory and from files.

It runs in a thread of its own, beside the steps, and holds nothing for anybody: what has gone when it is asked for is
not there. Who may connect is decided by the socket's keys, or by loopback.
"""

import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import zmq

from core import log
from core.tiers.peer_messages import (
    MAX_BLOCKS,
    MAX_NAMES,
    BlocksHere,
    BlocksSent,
    FindBlocks,
    GetBlocks,
    decode_question,
    encode,
    split_names,
)
from ipc.wire.sockets import BoundRouter, Context

_LINGER_MS = 0  # an asker computes what does not come


class Shelf(Protocol):
    """Where blocks are: a memory, or a folder."""

    def has(self, name: bytes) -> bool:
        """Return whether a block is there now."""

    def pack(self, name: bytes) -> bytearray | None:
        """Return a block as its file would have it; None: it is not there."""


class PeerServer:
    """One thread with a bound socket, from start() to close(). shelves: asked in this order."""

    def __init__(self, context: Context, router: BoundRouter, shelves: Sequence[Shelf]) -> None:
        self._context, self._router, self._shelves = context, router, shelves
        self._settle: Callable[[], None] = lambda: None
        self._end = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kv peers", daemon=True)

    def start(self, settle: Callable[[], None]) -> None:
        """Begin to answer. settle: called before it is said that a block is not there; it may have just come."""
        self._settle = settle
        self._thread.start()

    def close(self) -> None:
        """End the thread, the socket and its context."""
        os.eventfd_write(self._end, 1)
        self._thread.join()
        os.close(self._end)

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._router.close(_LINGER_MS)
            self._context.destroy(_LINGER_MS)

    def _serve(self) -> None:
        socket, poller = self._router.socket, zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._end, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._end in ready:
                return
            identity, *frames = socket.recv_multipart()
            try:
                answer = self._answer(frames)
                if answer:
                    socket.send_multipart([identity, *answer], zmq.NOBLOCK)
            except msgspec.MsgspecError:
                continue  # no question
            except zmq.ZMQError:
                continue  # the asker has gone, or does not read: it waits for nothing
            except OSError as error:
                log.say(f"engine-core: kv_listen: {error.strerror or error}; a peer gets no blocks")

    def _answer(self, frames: list[bytes]) -> list[bytes | bytearray]:
        """Return the frames of an answer; none to what is no question. Errors: MsgspecError, OSError."""
        match decode_question(frames[0]) if len(frames) == 1 else None:
            case FindBlocks(number, names) if len(found := split_names(names)) <= MAX_NAMES:
                return [encode(BlocksHere(number, self._count(found)))]
            case GetBlocks(number, names) if len(found := split_names(names)) <= MAX_BLOCKS:
                blocks = self._pack(found)
                return [encode(BlocksSent(number, len(blocks))), *blocks]
        return []

    def _count(self, names: list[bytes]) -> int:
        """Return how many of these blocks are here, from the first on."""
        count = self._count_now(names)
        if count == len(names):
            return count
        self._settle()
        return count + self._count_now(names[count:])

    def _count_now(self, names: list[bytes]) -> int:
        for count, name in enumerate(names):
            if not any(shelf.has(name) for shelf in self._shelves):
                return count
        return len(names)

    def _pack(self, names: list[bytes]) -> list[bytearray]:
        """Return the first of these blocks, up to one that is not there."""
        blocks: list[bytearray] = []
        for name in names:
            found = next((data for shelf in self._shelves if (data := shelf.pack(name)) is not None), None)
            if found is None:
                break
            blocks.append(found)
        return blocks
