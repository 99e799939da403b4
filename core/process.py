"""The engine loop: drains the inbox, runs the step, hands over its messages; sleeps while there is nothing to do."""

import sys
import time
import traceback
from collections.abc import Sequence
from typing import Protocol

from core.engine import EngineInput, EngineReply
from core.io_thread import IOThread

EXIT_OK = 0
EXIT_FAILED = 1
_FINISH_S = 2.0  # for telling the clients how the engine ended


class Engine(Protocol):
    """An EngineCore, captured or not."""

    @property
    def has_work(self) -> bool: ...

    def step(self, inbox: Sequence[tuple[int, EngineInput]], now_ns: int) -> Sequence[tuple[int, EngineReply]]: ...


def run(engine: Engine, io: IOThread) -> int:
    """Serve until drained; returns the exit code of the process. An exception in a step ends the engine: its state can
    no longer be trusted, and every client is told."""
    try:
        _loop(engine, io)
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"engine-core: a step failed, the engine ends: {text}", file=sys.stderr, flush=True)
        io.finish(text, _FINISH_S)
        return EXIT_FAILED
    io.finish("", _FINISH_S)
    return EXIT_OK


def _loop(engine: Engine, io: IOThread) -> None:
    inbox = io.inbox
    while engine.has_work or not inbox.has_ended:
        messages = inbox.drain(wait=not engine.has_work)
        if messages or engine.has_work:
            io.put(engine.step(messages, time.monotonic_ns()))
