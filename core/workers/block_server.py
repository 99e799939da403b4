"""BlockServer: the thread of a worker that accesses its KV blocks and states for an engine that cannot map them."""

import os
import threading
import traceback
from typing import NoReturn

from core import log
from core.execution.shared_blocks import ReadableBlocks, SharedBlocks, WritableBlocks
from core.workers.block_messages import (
    BlockQuestion,
    MemoryName,
    ReadBlocks,
    SettleBlocks,
    WriteBlocks,
    decode_block_question,
)
from ipc.machine.channel import Channel, ChannelEndedError

_LOG_S = 0.5  # for writing the last lines to standard error


class BlockServer:
    """Answers the engine's questions on a channel until it ends. count() is for the thread that runs plans."""

    def __init__(self, channel: Channel, blocks: SharedBlocks) -> None:
        self._channel, self._blocks = channel, blocks
        self._num_run = 0  # plans
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="kv blocks", daemon=True).start()

    def count(self) -> None:
        """Count a plan that has been run."""
        with self._changed:
            self._num_run += 1
            self._changed.notify_all()

    def _run(self) -> NoReturn:
        """Serve until the engine is gone. An error ends the worker, because the engine would wait for an answer."""
        try:
            while True:
                self._channel.send(self._answer(decode_block_question(self._channel.receive())))
        except ChannelEndedError:
            os._exit(0)
        except BaseException:
            log.say(traceback.format_exc())
            log.flush(_LOG_S)
            os._exit(1)

    def _answer(self, question: BlockQuestion) -> bytes:
        match question:
            case ReadBlocks(name, blocks):
                return b"".join(self._memory(name).views(*blocks))
            case WriteBlocks(name, blocks, content):
                memory, begin = self._writable(name), 0
                parts = memory.room(*blocks)
                for part in parts:
                    part[:] = memoryview(content)[begin : begin + len(part)]
                    begin += len(part)
                assert begin == len(content), f"{len(content)} bytes for {begin} of {len(blocks)} blocks"
                memory.fill(parts, *blocks)
            case SettleBlocks(num_plans):
                with self._changed:
                    self._changed.wait_for(lambda: self._num_run >= num_plans)
                self._blocks.settle()
        return b""

    def _memory(self, name: MemoryName) -> ReadableBlocks:
        return self._blocks.cache if name == "cache" else self._writable(name)

    def _writable(self, name: MemoryName) -> WritableBlocks:
        states = self._blocks.states
        if name == "states":
            assert states is not None, "a model without recurrent states"
            return states
        assert name == "host", name
        return self._blocks.host
