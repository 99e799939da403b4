"""PeerServer: sends KV blocks, from memory and from files, to other engines that request them by name.

It runs in a separate thread, concurrently with the steps, and reserves nothing: a block that is gone when it is
requested is a miss. The socket's keys, or loopback, decide who may connect.
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

_LINGER_MS = 0  # a client computes what does not arrive


class Shelf(Protocol):
    """A place where blocks are: a memory or a folder."""

    def has(self, name: bytes) -> bool:
        """Return whether a block is there now."""

    def pack(self, name: bytes) -> bytearray | None:
        """Return a block in its file format, or None if it is not there."""


class PeerServer:
    """One thread with a bound socket, from start() to close(). shelves: searched in this order."""

    def __init__(self, context: Context, router: BoundRouter, shelves: Sequence[Shelf]) -> None:
        self._context, self._router, self._shelves = context, router, shelves
        self._settle: Callable[[], None] = lambda: None
        self._end = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kv peers", daemon=True)

    def start(self, settle: Callable[[], None]) -> None:
        """Start answering.

        settle: called before answering that a block is missing, because it may have just arrived.
        """
        self._settle = settle
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and close the socket and its context."""
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
                continue  # not a question
            except zmq.ZMQError:
                continue  # the client is gone or does not read; do not wait for it
            except OSError as error:
                log.say(f"engine-core: kv_listen: {error.strerror or error}; a peer gets no blocks")

    def _answer(self, frames: list[bytes]) -> list[bytes | bytearray]:
        """Return the frames of an answer; none if it is not a question. Errors: MsgspecError, OSError."""
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
        """Return these blocks up to the first one that is missing."""
        blocks: list[bytearray] = []
        for name in names:
            found = next((data for shelf in self._shelves if (data := shelf.pack(name)) is not None), None)
            if found is None:
                break
            blocks.append(found)
        return blocks
