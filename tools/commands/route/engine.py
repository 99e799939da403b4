"""RouterEngine: a fleet instead of an engine, behind the engine's own border and loop."""

import time
from collections.abc import Callable, Sequence

from core.inputs import (
    BlocksArrived,
    BlocksFound,
    BlocksStored,
    EndPause,
    EngineInput,
    ExecutorLost,
    ExecutorRestored,
    HoldClient,
    ReleaseClient,
    RenewKVEvents,
    SetClientWeight,
)
from frontend.fleet.driver import Driver
from ipc.wire.call import Call
from ipc.wire.messages import Abort, AddRequest, Goodbye, ServerMessage
from ipc.wire.pooling_messages import AddPooling

_NS = 1e9


class RouterEngine:
    """core/process/loop.py's Engine. clock: monotonic seconds."""

    def __init__(self, driver: Driver, clock: Callable[[], float] = time.monotonic) -> None:
        self._driver = driver
        self._clock = clock
        self._fleet = driver.fleet

    @property
    def has_work(self) -> bool:
        """Return False: look_ahead() reads what replicas send."""
        return False

    @property
    def has_unfinished(self) -> bool:
        """Return whether there are live requests or calls, or messages from replicas or for clients wait."""
        return self._driver.has_arrived or self._fleet.has_unfinished or bool(self._fleet.to_clients)

    def look_ahead(self) -> bool:
        """Read what replicas have sent; return whether there is anything for the next step."""
        return self._driver.look() or bool(self._fleet.to_clients)

    def count_waiting(self) -> tuple[int, int]:
        """Return the numbers of choices that have not begun, and of their tokens."""
        requests = self._fleet.requests
        return requests.num_waiting, requests.num_waiting_tokens

    def step(self, inbox: Sequence[tuple[int, EngineInput]], now_ns: int) -> Sequence[tuple[int, ServerMessage]]:
        """Take in the messages of clients and replicas; return those for clients.

        After they are sent, turn() follows.
        """
        now = now_ns / _NS
        if not self._driver.has_arrived:  # this step takes in the messages that have woken it, instead of the next one
            self._driver.look()
        self._driver.take_in(now)
        for client, message in inbox:
            self._receive(client, message, now)
        self._driver.carry_out(now)
        return self._fleet.take_messages()

    def turn(self, _: int) -> None:
        """Let the fleet apply the effects of its messages, and do what is due by time."""
        self._driver.pass_time(self._clock())

    def _receive(self, client: int, message: EngineInput, now: float) -> None:
        fleet = self._fleet
        match message:
            case AddRequest() | AddPooling():
                fleet.submit(client, message, now)
            case Abort():
                fleet.abort(client, message)
            case Goodbye():
                fleet.leave(client)
            case HoldClient():
                fleet.hold(client)
            case ReleaseClient():
                fleet.release(client, now)
            case EndPause():
                fleet.resume(now)
            case SetClientWeight() | RenewKVEvents():
                pass  # replicas handle shares, and no client of a fleet follows KV events
            case ExecutorLost() | ExecutorRestored() | BlocksFound() | BlocksArrived() | BlocksStored():
                pass  # a router has no executor and no blocks
            case Call():
                fleet.call(client, message, now)
