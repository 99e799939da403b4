"""A worker process: `python -P -m core.workers FD`, started by core/workers/crew.py.

FD is one end of a socket pair; the engine has the other. Its connections to other workers are inherited descriptors,
whose numbers are in the first message.

It mirrors the batch from the plans that it receives, and runs them on its own executor. It ends when the other end of
its socket closes, no matter what it is doing, and when its engine dies.
"""

import contextlib
import ctypes
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, assert_never, runtime_checkable

import msgspec

from core import log
from core.execution.encoding import decode_plan, encode_output
from core.execution.executor import Executor
from core.execution.shared_blocks import BlockMemory, SharedBlocks, shared_blocks_of
from core.executors.by_name import load_executor
from core.model_files.progress import following
from core.workers.messages import (
    AddFeature,
    AddMatrix,
    Allocate,
    Answer,
    CountBlocks,
    DropAdapters,
    DropFeatures,
    Failed,
    FindMemory,
    Load,
    Loaded,
    MeasureCosts,
    Measured,
    MeasuredSteps,
    MeasureSteps,
    Number,
    Progress,
    Question,
    Result,
    Run,
    ShareBlocks,
    SharedPlaces,
    WarmUp,
    decode_question,
    encode_message,
)
from core.workers.wires import Place, Wires
from ipc.errors import EngineCoreError, OutOfMemoryError
from ipc.machine.channel import Channel, ChannelEndedError
from ipc.machine.cpus import usable_cpus
from ipc.options.config import EngineConfig
from kernels.memory.shared_file import SharedArray, SharedFile

if TYPE_CHECKING:
    from core.runner.feature_rows import EncoderShape, KeptFeatures
    from core.workers.block_server import BlockServer
    from core.workers.sent_adapters import ReceivedAdapters
    from core.workers.sent_features import ReceivedFeatures

# Placement: the CPUs of each rank of a group: those of one NUMA node, whose memory will hold the rank's weights.


_NODES = Path("/sys/devices/system/node")


def numa_nodes() -> list[set[int]]:
    """Return the CPUs of each NUMA node of this machine; empty if the system does not report them."""
    files = sorted(_NODES.glob("node[0-9]*/cpulist"), key=lambda file: int(file.parent.name.removeprefix("node")))
    return [cpus for file in files if (cpus := parse_cpus(file.read_text()))]


def parse_cpus(text: str) -> set[int]:
    """Return the CPUs of a list such as "0-3,8,10-11"."""
    cpus = set[int]()
    for part in text.split(","):
        if part.strip():
            first, _, last = part.strip().partition("-")
            cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def cpus_of(rank: int, size: int, nodes: list[set[int]], usable: set[int]) -> set[int]:
    """Return the CPUs for a rank. Consecutive ranks share a node if there are fewer nodes than ranks.

    nodes: the CPUs of each. usable: those that this process may use. With one usable node: all of them.
    """
    there = [cpus & usable for cpus in nodes if cpus & usable]
    if len(there) < 2:
        return usable
    first = rank * len(there) // size
    last = max(first + 1, (rank + 1) * len(there) // size)
    return set[int]().union(*there[first:last])


def bind(number: int, count: int) -> int:
    """Bind this process, which is worker `number` of `count`, to its CPUs. Return how many threads it should have.

    The workers on one node share its CPUs, and a quota of CPU time, equally.
    """
    usable = os.sched_getaffinity(0)
    share = max(1, usable_cpus() // count)
    own = cpus_of(number, count, numa_nodes(), usable)
    if own != usable:
        os.sched_setaffinity(0, own)
    return min(share, len(own))


EXIT_FAILED = 1
_LOG_S = 0.5  # for writing the last lines to standard error
_PR_SET_PDEATHSIG = 1  # prctl(2)


def main(arguments: list[str]) -> int:
    """Serve until the engine is gone, and return the exit code. arguments: see above."""
    if len(arguments) != 1 or not arguments[0].isdigit():
        print(f"usage: {__doc__}", file=sys.stderr)
        return 2
    faulthandler.enable()
    # the engine sends SIGUSR1 to a worker that hangs, to get every thread's stack
    faulthandler.register(signal.SIGUSR1)
    # they are sent to the process group, and the engine decides
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked for exec
    engine = socket.socket(fileno=int(arguments[0]))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # reaches a stopped worker too
    threading.Thread(target=_watch, args=(engine.fileno(),), name="lease", daemon=True).start()
    channel = Channel(engine)
    try:
        Worker(channel).serve()
    except ChannelEndedError:
        return 0
    except BaseException as error:
        failed = _describe(error)
        if not failed.error:
            log.say(traceback.format_exc())
        with contextlib.suppress(ChannelEndedError):
            channel.send(encode_message(failed))
    return EXIT_FAILED


def _watch(fd: int) -> None:
    """End the process when the engine's end of the socket closes, even while a step runs or hangs."""
    poller = select.poll()
    poller.register(fd, 0)  # only POLLHUP and POLLERR
    poller.poll()
    os._exit(0)


def _describe(error: BaseException) -> Failed:
    if isinstance(error, EngineCoreError):
        return Failed(type(error).__name__, str(error))
    if isinstance(error, MemoryError):
        return Failed(OutOfMemoryError.__name__, f"a worker ran out of memory{f' ({error})' if str(error) else ''}")
    return Failed("", traceback.format_exception_only(error)[-1].splitlines()[0])


@runtime_checkable
class TakesFeatures(Protocol):
    """The further methods of an executor whose model reads features. features: None = it reads none."""

    features: Any

    def take_features(self, features: "KeptFeatures") -> "EncoderShape | None":
        """Read features that another process makes, before initialize_cache(). Return what is known of its encoder."""


class Worker:
    """The executor of one worker process, and its connection to the engine."""

    def __init__(self, channel: Channel) -> None:
        """Serve this channel."""
        self._channel = channel
        self._place = Place()
        #: Gives the executor sampled tokens of steps. An executor that runs whole steps knows them already.
        self._learn: Callable[[list[tuple[bytes, bytes | None]]], None] = lambda sampled: None
        self._executor: Executor | None = None
        self._file: SharedFile | None = None  # for the blocks, if the engine has a store of them
        self._asked = -1  # instead, the stream on which an engine that cannot map it asks for them
        self._server: BlockServer | None = None  # answers there
        self._has_cache = False

    def serve(self) -> NoReturn:
        """Answer the engine's messages. Errors: ChannelEndedError when it is gone, and the executor's."""
        while True:
            self._prepare_ahead()
            answer = self._answer(decode_question(self._channel.receive()))
            if answer is not None:
                self._channel.send(encode_message(answer))

    def _prepare_ahead(self) -> None:
        while self._has_cache and not self._channel.has_frame and self._ready.prepare_ahead():
            pass

    def _answer(self, question: Question) -> Answer | None:
        match question:
            case Run(plan, sampled):
                if sampled:
                    self._learn(sampled)
                output = self._ready.execute(decode_plan(plan)).result()
                if (counting := self._file or self._server) is not None:
                    counting.count()
                return Result(encode_output(output)) if self._place.answers else None
            case Load(config, place, wires):
                self._place = place
                self._file, self._asked = None if wires.blocks < 0 else SharedFile(wires.blocks), wires.asked
                log.use_format(config.log_format)
                with following(lambda share: self._channel.send(encode_message(Progress(share)))):
                    self._executor = self._load(config, wires)
                return Loaded(self._executor.info, self._take_features(self._executor))
            case Allocate(config):
                with contextlib.nullcontext() if self._file is None else self._file.arrays():
                    self._ready.initialize_cache(config)
                self._has_cache = True
                return Loaded(self._ready.info)
            case CountBlocks(memory_bytes, block_size):
                return Number(self._ready.determine_num_available_blocks(memory_bytes, block_size))
            case FindMemory():
                return Number(self._ready.cache_memory_bytes())
            case MeasureCosts():
                return Measured(self._ready.measure_costs())
            case MeasureSteps():
                return MeasuredSteps(self._ready.measure_steps())
            case AddMatrix():
                self._received.add(question)
                return None
            case DropAdapters(digests):
                self._received.drop(digests)
                return None
            case AddFeature():
                self._given.add(question)
                return None
            case DropFeatures(digests):
                self._given.forget(digests)
                return None
            case ShareBlocks():
                return self._places()
            case WarmUp():
                return Number(self._ready.warm_up())
            case _:
                assert_never(question)

    @cached_property
    def _received(self) -> "ReceivedAdapters":
        # Imported here because only an engine with adapters needs it.
        from core.workers.sent_adapters import ReceivedAdapters

        adapters = self._ready.adapters
        assert adapters is not None, "an adapter, but enable_lora is off"
        return ReceivedAdapters(adapters)

    @cached_property
    def _given(self) -> "ReceivedFeatures":
        # Imported here because only a model that reads features needs it.
        from core.workers.sent_features import ReceivedFeatures, UnreadFeatures

        return UnreadFeatures() if self._place.stage else ReceivedFeatures()

    def _take_features(self, executor: Executor) -> bool:
        """Let an executor that reads features take those that the engine sends. Return whether it does."""
        if not isinstance(executor, TakesFeatures) or executor.features is None:
            return False
        self._given.encoder = executor.take_features(self._given)
        return True

    def _places(self) -> SharedPlaces:
        blocks, file = shared_blocks_of(self._ready), self._file
        if blocks is not None and self._asked >= 0:
            return self._serve_blocks(blocks)
        if blocks is None or file is None:
            return SharedPlaces([], [], [], "")

        def places(memory: object) -> list[SharedArray]:
            return [file.place_of(array) for array in memory.arrays] if isinstance(memory, BlockMemory) else []

        return SharedPlaces(places(blocks.cache), places(blocks.host), places(blocks.states), blocks.layout)

    def _serve_blocks(self, blocks: SharedBlocks) -> SharedPlaces:
        # Imported here because only workers on other machines, and with GPUs, need it.
        from core.workers.block_server import BlockServer

        self._server = BlockServer(Channel(socket.socket(fileno=self._asked)), blocks)
        memories = {"cache": blocks.cache, "host": blocks.host, "states": blocks.states}
        sizes = {name: (one.num_blocks, one.bytes_per_block) for name, one in memories.items() if one is not None}
        return SharedPlaces([], [], [], blocks.layout, sizes)

    def _load(self, config: EngineConfig, wires: Wires) -> Executor:
        if self._place.count == 1 or config.executor != "local":
            return load_executor(config)
        here = self._place.neighbours
        num_threads = bind(here.index(self._place.number), len(here))
        config = msgspec.structs.replace(config, threads=config.threads or num_threads)
        # Imported here because only parts of a model need them, and they take time.
        if config.device == "cuda":
            from core.workers.device_part import DevicePartExecutor

            return DevicePartExecutor(config, self._place, wires)
        from core.workers.part_executor import PartExecutor

        executor = PartExecutor(config, self._place, wires)
        self._learn = executor.learn
        return executor

    @property
    def _ready(self) -> Executor:
        assert self._executor is not None, "the first message is Load"
        return self._executor


if __name__ == "__main__":
    code = main(sys.argv[1:])
    log.flush(_LOG_S)
    os._exit(code)  # skips interpreter teardown: threads may be in C code, and nothing outlives the process
