"""The engine loop: drain the inbox, run the step, send its messages to the IO thread, and sleep if there is no work."""

import time
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol

from core import log
from core.border.io_thread import IOThread
from core.border.socket_rounds import AddressedMessage
from core.inputs import EngineInput
from ipc.wire.messages import EngineStopping

EXIT_FAILED = 1
_FINISH_S = 2.0  # without progress in reporting to the clients how the engine ended
_LOG_S = 0.5  # for writing the last lines to standard error
_IDLE_S = 5.0  # between two turns of an idle loop; frontend/engine/supervised_engine.py relies on it
_HELD_S = 0.1  # between checks of the deadlines of requests that wait for their client or for the end of a pause


class Engine(Protocol):
    """An EngineCore, captured or not."""

    @property
    def has_work(self) -> bool:
        """Return False if nothing can happen until a message arrives or a deadline passes."""

    @property
    def has_unfinished(self) -> bool:
        """Return whether any request is live."""

    def count_waiting(self) -> tuple[int, int]:
        """Return (number of waiting requests, number of their tokens)."""

    def step(self, inbox: Sequence[tuple[int, EngineInput]], now_ns: int) -> Sequence[AddressedMessage]:
        """Run one step on these (client, input) pairs, and return the (client, reply) pairs. now_ns: monotonic time."""


def run(
    engine: Engine,
    io: IOThread,
    prepare_ahead: Callable[[], bool],
    turn: Callable[[int], None] = lambda _: None,
    idle_s: float = _IDLE_S,
    rest: Callable[[], None] = lambda: None,
) -> int:
    """Serve until drained; return the exit code of the process.

    prepare_ahead: the executor's method of that name. turn: called at the end of every round of the loop with the
    number of waiting requests. idle_s: time between two rounds of an idle loop. rest: called after each round without a
    message and without a live request.

    An exception in a step ends the engine, because its state can no longer be trusted. Every client receives the error.
    """
    try:
        _loop(engine, io, prepare_ahead, turn, rest, idle_s)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        log.say(traceback.format_exc())
        log.say(f"engine-core: a step failed and the engine ends: {text}")
        io.finish(EngineStopping(text, io.will_be_replaced), _FINISH_S)
        log.flush(_LOG_S)
        return EXIT_FAILED
    io.finish(io.departure.last_message, _FINISH_S)
    return io.departure.exit_code


def _loop(
    engine: Engine,
    io: IOThread,
    prepare_ahead: Callable[[], bool],
    turn: Callable[[int], None],
    rest: Callable[[], None],
    idle_s: float,
) -> None:
    inbox, num_waiting = io.inbox, 0
    while engine.has_unfinished or not inbox.has_ended:
        waits = not engine.has_work and not prepare_ahead()
        messages = io.take(0 if not waits else _HELD_S if engine.has_unfinished else idle_s)
        if messages or engine.has_unfinished:
            begun_ns = time.monotonic_ns()
            outputs = engine.step(messages, begun_ns)
            num_waiting, num_waiting_tokens = engine.count_waiting()
            # before io.put(), so that clients that see the outputs also see the counts
            inbox.settle(num_waiting, num_waiting_tokens, time.monotonic_ns() - begun_ns)
            io.put(outputs)
        elif waits:
            rest()
        turn(num_waiting)
