"""Blocks of workers whose memory the engine cannot map: they are read and written as if they were its own."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from core.execution.shared_blocks import BlockMemory, BlocksLostError, SharedBlocks
from core.workers.block_messages import ReadBlocks, decode_block_question, encode_block_question
from core.workers.block_server import BlockServer
from core.workers.messages import SharedPlaces
from core.workers.shared_parts import JoinedMemory, Parts, replace_parts
from core.workers.wires import Wires
from ipc.errors import MalformedMessageError
from ipc.machine.channel import Channel
from kernels.elements import FLOAT32
from kernels.memory.shared_file import SharedFile
from tests.placed import PREFIX

NUM_BLOCKS = 6


def memory(seed: int) -> BlockMemory:
    """Of two parts."""
    generator = np.random.default_rng(seed)
    return BlockMemory([generator.standard_normal((NUM_BLOCKS, width), np.float32) for width in (3, 5)])


def places_of(blocks: SharedBlocks) -> SharedPlaces:
    sizes = {"cache": blocks.cache, "host": blocks.host, "states": blocks.states}
    served = {name: (one.num_blocks, one.bytes_per_block) for name, one in sizes.items() if one is not None}
    return SharedPlaces([], [], [], blocks.layout, served)


@contextmanager
def served(blocks: SharedBlocks, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Channel, BlockServer, list[int]]]:
    """A worker in this process, whose end is recorded."""
    ends, is_over = list[int](), threading.Event()

    def end(code: int) -> None:
        ends.append(code)
        is_over.set()

    monkeypatch.setattr(f"{PREFIX}core.workers.block_server.os._exit", end)
    ours, theirs = socket.socketpair()
    server = BlockServer(Channel(theirs), blocks)
    try:
        yield Channel(ours), server, ends
    finally:
        ours.close()
        assert is_over.wait(10)
        theirs.close()


def test_parts_of_a_file_and_of_a_server_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    there = SharedBlocks(memory(1), memory(2), "there", memory(3))
    wires = Wires(peers=[], ranks=[])
    with served(there, monkeypatch) as (channel, server, _):
        parts = Parts([wires], [channel])
        file = SharedFile(wires.blocks)
        names = "cache", "host", "states"
        own = {name: [file.zeros((NUM_BLOCKS, width), FLOAT32) for width in (2, 4)] for name in names}
        for number, arrays in enumerate(own.values()):
            for array in arrays:
                array[:] = np.random.default_rng(number).standard_normal(array.shape)
        here = SharedPlaces(*([file.place_of(array) for array in arrays] for arrays in own.values()), "here")
        joined = parts.join([here, places_of(there)])
        assert joined.layout == "2 parts: here; there"
        assert joined.states is not None
        for name, at, elsewhere in (
            ("cache", joined.cache, there.cache),
            ("host", joined.host, there.host),
            ("states", joined.states, there.states),
        ):
            assert elsewhere is not None
            for blocks in ((2,), (0, 5)):
                expected = b"".join(
                    b"".join([*(array[block].tobytes() for array in own[name]), *elsewhere.views(block)])
                    for block in blocks
                )
                assert b"".join(at.views(*blocks)) == expected
                assert len(expected) == len(blocks) * at.bytes_per_block
        assert joined.host.num_blocks == NUM_BLOCKS
        for target in (joined.host, joined.states):
            rooms = target.room(1, 4)
            content = np.random.default_rng(9).integers(0, 255, 2 * target.bytes_per_block, np.uint8).tobytes()
            begin = 0
            for room in rooms:
                room[:] = content[begin : begin + len(room)]
                begin += len(room)
            target.fill(rooms, 1, 4)
            assert b"".join(target.views(1, 4)) == content
        server.count()
        file.count()
        parts.wait(1, lambda: False)
        waiting = threading.Thread(target=parts.wait, args=(2, lambda: False))
        waiting.start()
        file.count()
        waiting.join(0.05)
        assert waiting.is_alive(), "the other worker has not run the second plan"
        server.count()
        waiting.join(10)
        assert not waiting.is_alive()
        parts.close()
        os.close(wires.blocks)


def test_blocks_of_a_lost_worker_are_neither_read_nor_written(monkeypatch: pytest.MonkeyPatch) -> None:
    there = SharedBlocks(memory(1), memory(2), "there")
    with served(there, monkeypatch) as (channel, server, ends):
        parts = Parts([], [channel])
        joined = parts.join([places_of(there)])
        assert joined.states is None
        rooms = joined.host.room(3)
        lost = list[BlocksLostError]()

        def wait() -> None:
            try:
                parts.wait(1, lambda: False)
            except BlocksLostError as error:
                lost.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        parts.cut()
        waiting.join(10)
        assert len(lost) == 1
        server.count()
        with pytest.raises(BlocksLostError):
            joined.cache.views(1)
        with pytest.raises(BlocksLostError):
            joined.host.fill(rooms, 3)
        parts.close()
        with pytest.raises(BlocksLostError):
            joined.cache.views(1)
    assert ends == [0]  # the worker ends with its engine
    other = JoinedMemory([memory(7)])
    replace_parts(joined, SharedBlocks(other, JoinedMemory([memory(8)]), "1 parts: there"))
    assert joined.cache.views(1) == other.views(1)


def test_messages_of_another_kind_are_refused() -> None:
    question = ReadBlocks("states", [1, 2])
    assert decode_block_question(encode_block_question(question)) == question
    with pytest.raises(MalformedMessageError):
        decode_block_question(b"\x93\x01\xa3abc\x90")
