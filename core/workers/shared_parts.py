"""The engine's view of its workers' KV blocks, host pools and states, of each of which every worker has a part.

The engine maps the files of workers on its own machine. Other workers answer its questions (core/workers/
block_server.py).
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from core.execution.shared_blocks import BlockMemory, BlocksLostError, SharedBlocks, WritableBlocks
from core.workers.block_messages import (
    BlockQuestion,
    MemoryName,
    ReadBlocks,
    SettleBlocks,
    WriteBlocks,
    encode_block_question,
)
from core.workers.messages import SharedPlaces
from core.workers.wires import Wires, above
from ipc.machine.channel import Channel, ChannelEndedError
from kernels.memory.shared_file import arrays_of, count_in, make_file

_POLL_S = 0.0002
Item = TypeVar("Item")


class _Part(Protocol):
    """The access to one worker's part."""

    def wait(self, num_plans: int, is_lost: Callable[[], bool]) -> None:
        """Wait until the worker has run so many plans, or until all are lost. Errors: BlocksLostError."""

    def memory(self, name: MemoryName, places: SharedPlaces) -> WritableBlocks | None:
        """Return one of its memories; None: it has none."""

    def cut(self) -> None:
        """Let nothing wait for the worker any more."""

    def close(self) -> None:
        """Release what is not needed by memories that are in use."""


class _FilePart:
    """The part of a worker on this machine."""

    def __init__(self, wires: Wires) -> None:
        """wires: the worker's, which get its file."""
        self._fd = make_file()
        wires.blocks = above(self._fd)
        self._count = count_in(self._fd)  # plans that the worker has run

    def wait(self, num_plans: int, is_lost: Callable[[], bool]) -> None:
        while int(self._count[0]) < num_plans and not is_lost():
            time.sleep(_POLL_S)

    def memory(self, name: MemoryName, places: SharedPlaces) -> WritableBlocks | None:
        arrays = arrays_of(self._fd, getattr(places, name))
        return BlockMemory(arrays) if arrays else None

    def cut(self) -> None:
        pass  # wait() looks whether it is lost, and its memory stays

    def close(self) -> None:
        os.close(self._fd)


class _AskedPart:
    """The part of a worker whose memory this process cannot map. channel: to its BlockServer; owned."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._turn = channel, threading.Lock()

    def wait(self, num_plans: int, is_lost: Callable[[], bool]) -> None:
        self.ask(SettleBlocks(num_plans))

    def memory(self, name: MemoryName, places: SharedPlaces) -> WritableBlocks | None:
        sizes = places.served.get(name)
        return None if sizes is None else _AskedMemory(self, name, *sizes)

    def cut(self) -> None:
        with contextlib.suppress(OSError):  # it has been closed
            self._channel.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._channel.close()

    def ask(self, question: BlockQuestion) -> bytes:
        """Return the answer. For any thread. Errors: BlocksLostError."""
        try:
            with self._turn:
                self._channel.send(encode_block_question(question))
                return self._channel.receive()
        except (ChannelEndedError, OSError, ValueError) as error:  # the last two: it has been closed here
            raise BlocksLostError(str(error)) from error


class _AskedMemory(NamedTuple):
    """One memory of such a worker. A block is one part here."""

    part: _AskedPart
    name: MemoryName
    num_blocks: int
    bytes_per_block: int

    def views(self, *blocks: int) -> list[memoryview]:
        content = memoryview(self.part.ask(ReadBlocks(self.name, list(blocks))))
        if len(content) != len(blocks) * self.bytes_per_block:
            raise BlocksLostError(f"{len(content)} bytes arrived for {len(blocks)} blocks")
        return [content[at : at + self.bytes_per_block] for at in range(0, len(content), self.bytes_per_block)]

    def room(self, *blocks: int) -> list[memoryview]:
        return [memoryview(bytearray(self.bytes_per_block)) for _ in blocks]

    def fill(self, parts: Sequence[memoryview], *blocks: int) -> None:
        self.part.ask(WriteBlocks(self.name, list(blocks), b"".join(parts)))


class JoinedMemory:
    """Blocks whose parts several workers have; the parts follow one another in the order of the workers.

    memories: of the workers; replaced by those of others if workers are lost.
    """

    def __init__(self, memories: list[WritableBlocks]) -> None:
        self.memories = memories

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks."""
        return self.memories[0].num_blocks

    @property
    def bytes_per_block(self) -> int:
        """Return the bytes of one block."""
        return sum(memory.bytes_per_block for memory in self.memories)

    def views(self, *blocks: int) -> list[memoryview]:
        """Return the parts of each block, block after block. Errors: BlocksLostError."""
        return _by_block([memory.views(*blocks) for memory in self.memories], len(blocks))

    def room(self, *blocks: int) -> list[memoryview]:
        """Return writable memory for the parts of each block, block after block."""
        return _by_block([memory.room(*blocks) for memory in self.memories], len(blocks))

    def fill(self, parts: Sequence[memoryview], *blocks: int) -> None:
        """Give these blocks what was written to the parts that room() returned. Errors: BlocksLostError."""
        each, first = len(parts) // max(1, len(blocks)), 0
        for memory in self.memories:
            count = 1 if isinstance(memory, _AskedMemory) else len(memory.views(blocks[0]))
            own = [part for at in range(0, len(parts), each) for part in parts[at + first : at + first + count]]
            memory.fill(own, *blocks)
            first += count


def _by_block(each: list[list[Item]], num_blocks: int) -> list[Item]:
    """Return what each worker has of the blocks, block after block."""
    counts = [len(own) // max(1, num_blocks) for own in each]
    return [
        part
        for block in range(num_blocks)
        for own, count in zip(each, counts, strict=True)
        for part in own[block * count : (block + 1) * count]
    ]


class Parts:
    """The parts of one crew's blocks, in the engine."""

    def __init__(self, wires: Sequence[Wires], channels: Sequence[Channel]) -> None:
        """wires: of the workers on this machine, each of which gets its file. channels: to the others, which follow."""
        self._parts: list[_Part] = [*map(_FilePart, wires), *map(_AskedPart, channels)]

    def wait(self, num_plans: int, is_lost: Callable[[], bool]) -> None:
        """Wait until each worker has run so many plans, or until they are lost. Errors: BlocksLostError."""
        for part in self._parts:
            part.wait(num_plans, is_lost)

    def join(self, places: Sequence[SharedPlaces]) -> SharedBlocks:
        """Return the blocks of all workers."""

        def memory(name: MemoryName) -> JoinedMemory:
            own = [part.memory(name, each) for part, each in zip(self._parts, places, strict=True)]
            return JoinedMemory([one for one in own if one is not None])

        layout = f"{len(places)} parts: {'; '.join(each.layout for each in places)}"
        states = memory("states")
        return SharedBlocks(memory("cache"), memory("host"), layout, states if states.memories else None)

    def cut(self) -> None:
        """Let nothing wait for a worker any more: they are lost. For any thread."""
        for part in self._parts:
            part.cut()

    def close(self) -> None:
        """Close files and channels. What has been joined of files stays valid."""
        for part in self._parts:
            part.close()
        self._parts.clear()


def replace_parts(blocks: SharedBlocks, by: SharedBlocks) -> None:
    """Let what reads `blocks` read those of other workers, which have the same layout, from now on."""
    assert blocks.layout == by.layout, f"the workers' blocks have changed: {blocks.layout}, now {by.layout}"
    for memory, other in zip((blocks.cache, blocks.host, blocks.states), (by.cache, by.host, by.states), strict=True):
        if isinstance(memory, JoinedMemory) and isinstance(other, JoinedMemory):
            memory.memories[:] = other.memories
