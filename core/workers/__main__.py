"""A worker process: `python -P -m core.workers FD [GROUP_FD PEER_FD ...]`, started by core/workers/crew.py.

FD is one end of a socket pair, whose other end is the engine's. GROUP_FD is the memory file of a group of workers that
compute a model together, and PEER_FDs are ends of socket pairs between the first of them and the others.

It mirrors the batch from the plans that it gets, and runs them on an executor of its own. It ends when the other end of
its socket closes, whatever it does then, and when its engine dies.
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
from typing import NoReturn, assert_never

import msgspec

from core import log
from core.execution.encoding import decode_plan, encode_output
from core.execution.executor import Executor
from core.executors.by_name import load_executor
from core.model_files.progress import following
from core.workers.messages import (
    Allocate,
    Answer,
    CountBlocks,
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
    WarmUp,
    decode_question,
    encode_message,
)
from core.workers.placement import place
from ipc.channel import Channel, ChannelEndedError
from ipc.config import EngineConfig
from ipc.errors import EngineCoreError, OutOfMemoryError

EXIT_FAILED = 1
_LOG_S = 0.5  # for the last lines on standard error
_PR_SET_PDEATHSIG = 1  # prctl(2)


def main(arguments: list[str]) -> int:
    """Serve until the engine is gone; return the exit code. arguments: see above."""
    if len(arguments) < 1 or not all(argument.isdigit() for argument in arguments):
        print(f"usage: {__doc__}", file=sys.stderr)
        return 2
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the engine sends it to a worker that hangs: where is each thread?
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to the process group: the engine decides
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked for exec
    engine = socket.socket(fileno=int(arguments[0]))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # reaches a stopped worker, too
    threading.Thread(target=_watch, args=(engine.fileno(),), name="lease", daemon=True).start()
    channel = Channel(engine)
    try:
        Worker(channel, [int(argument) for argument in arguments[1:]]).serve()
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
    """End the process when the engine's end of the socket closes, also while a step runs or hangs."""
    poller = select.poll()
    poller.register(fd, 0)  # POLLHUP and POLLERR alone
    poller.poll()
    os._exit(0)


def _describe(error: BaseException) -> Failed:
    if isinstance(error, EngineCoreError):
        return Failed(type(error).__name__, str(error))
    if isinstance(error, MemoryError):
        return Failed(OutOfMemoryError.__name__, f"a worker got no more memory{f' ({error})' if str(error) else ''}")
    return Failed("", traceback.format_exception_only(error)[-1].splitlines()[0])


class Worker:
    """The executor of one worker process, and who asks it."""

    def __init__(self, channel: Channel, group: list[int]) -> None:
        """Serve this channel. group: the descriptors of the group's memory and peers; empty = the worker is alone."""
        self._channel, self._group = channel, group
        self._rank = 0
        self._executor: Executor | None = None
        self._has_cache = False

    def serve(self) -> NoReturn:
        """Answer the engine's messages. Errors: ChannelEndedError when it is gone; the executor's."""
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
            case Run(plan):
                output = self._ready.execute(decode_plan(plan)).result()
                return None if self._rank else Result(encode_output(output))
            case Load(config, rank, size):
                self._rank = rank
                log.use_format(config.log_format)
                with following(lambda share: self._channel.send(encode_message(Progress(share)))):
                    self._executor = self._load(config, rank, size)
                return Loaded(self._executor.info)
            case Allocate(config):
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
            case WarmUp():
                return Number(self._ready.warm_up())
            case _:
                assert_never(question)

    def _load(self, config: EngineConfig, rank: int, size: int) -> Executor:
        if size == 1 or config.executor != "local":
            return load_executor(config)
        num_threads = place(rank, size)
        config = msgspec.structs.replace(config, threads=config.threads or num_threads)
        memory, *peers = self._group
        channels = [Channel(socket.socket(fileno=fd)) for fd in peers]
        # Imported here: only ranks of a group need it, and it takes time.
        from core.workers.rank_executor import create_rank

        return create_rank(config, rank, size, memory, channels)

    @property
    def _ready(self) -> Executor:
        assert self._executor is not None, "the first message is Load"
        return self._executor


if __name__ == "__main__":
    code = main(sys.argv[1:])
    log.flush(_LOG_S)
    os._exit(code)  # skips the interpreter's teardown: threads may be in C code, and nothing outlives the process
