"""The engine loop: drains the inbox, runs the step, hands over its messages; sleeps while there is nothing to do."""

import time
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol

from core import log
from core.border.io_thread import IOThread
from core.inputs import EngineInput, EngineReply

EXIT_OK = 0
EXIT_FAILED = 1
_FINISH_S = 2.0  # for telling the clients how the engine ended
_LOG_S = 0.5  # for the last lines on standard error
_HELD_S = 0.1  # between looks at the deadlines of requests that wait for their client or for the end of a pause


class Engine(Protocol):
    """An EngineCore, captured or not."""

    @property
    def has_work(self) -> bool: ...

    @property
    def has_unfinished(self) -> bool: ...

    def count_waiting(self) -> tuple[int, int]: ...

    def step(self, inbox: Sequence[tuple[int, EngineInput]], now_ns: int) -> Sequence[tuple[int, EngineReply]]: ...


def run(engine: Engine, io: IOThread, prepare_ahead: Callable[[], bool]) -> int:
    """Serve until drained; returns the exit code of the process. An exception in a step ends the engine: its state can
    no longer be trusted, and every client is told. prepare_ahead: the executor's."""
    try:
        _loop(engine, io, prepare_ahead)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        log.say(traceback.format_exc())
        log.say(f"engine-core: a step failed, the engine ends: {text}")
        io.finish(text, _FINISH_S)
        log.flush(_LOG_S)
        return EXIT_FAILED
    io.finish("", _FINISH_S)
    return EXIT_OK


def _loop(engine: Engine, io: IOThread, prepare_ahead: Callable[[], bool]) -> None:
    inbox = io.inbox
    while engine.has_unfinished or not inbox.has_ended:
        waits = not engine.has_work and not prepare_ahead()
        messages = io.take(0 if not waits else _HELD_S if engine.has_unfinished else None)
        if messages or engine.has_unfinished:
            outputs = engine.step(messages, time.monotonic_ns())
            inbox.settle(*engine.count_waiting())  # before clients know: then what they see is accounted for
            io.put(outputs)
