"""The cost of a wake-up on this machine: the hops of a request between a caller and the engine, one by one.

Each hop is measured as a round trip, and halved. Awake: one after the other without a pause, so that cores stay awake.
Idle: after a pause in which both sides and their cores have gone to sleep, as when a request meets an idle engine.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import zmq

from ipc.wire.sockets import Socket, bind_router, connect_dealer, private_ipc_address, remove_private_address
from tools.commands.replay.latency import percentile

_COUNT = 100
_PAUSE_S = 0.003

RoundTrip = Callable[[], object]


@contextmanager
def _answered(serve: Callable[[], object]) -> Iterator[None]:
    """Run a thread that calls serve() until it returns False."""

    def run() -> None:
        while serve() is not False:
            pass

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join()


@contextmanager
def queues() -> Iterator[RoundTrip]:
    """Yield a round trip between two threads, like the engine's two: Python's lock is handed over as well."""
    there: SimpleQueue[bool] = SimpleQueue()
    back: SimpleQueue[bool] = SimpleQueue()

    def serve() -> bool:
        goes_on = there.get()
        back.put(goes_on)
        return goes_on

    def round_trip() -> None:
        there.put(True)
        back.get()

    with _answered(serve):
        yield round_trip
        there.put(False)


@contextmanager
def eventfds() -> Iterator[RoundTrip]:
    """Yield a round trip to a polling thread, as when a caller wakes its client's IO thread."""
    there, back = os.eventfd(0), os.eventfd(0)
    poller, answers = zmq.Poller(), zmq.Poller()
    poller.register(there, zmq.POLLIN)
    answers.register(back, zmq.POLLIN)

    def serve() -> bool:
        poller.poll()
        goes_on = os.eventfd_read(there) == 1
        os.eventfd_write(back, 1)
        return goes_on

    def round_trip() -> None:
        os.eventfd_write(there, 1)
        answers.poll()
        os.eventfd_read(back)

    with _answered(serve):
        yield round_trip
        os.eventfd_write(there, 2)
    os.close(there)
    os.close(back)


@contextmanager
def sockets() -> Iterator[RoundTrip]:
    """Yield a round trip from a DEALER to a ROUTER.

    It takes three wake-ups one way, because libzmq has its own thread on each side.
    """
    here: zmq.Context[Socket] = zmq.Context()
    over_there: zmq.Context[Socket] = zmq.Context()
    address = private_ipc_address()
    router = bind_router(over_there, address, is_private=True)
    dealer = connect_dealer(here, address)

    def serve() -> bool:
        identity, frame = router.socket.recv_multipart()
        router.socket.send_multipart((identity, frame))
        return bool(frame)

    def round_trip() -> None:
        dealer.send(b"x")
        dealer.recv()

    with _answered(serve):
        yield round_trip
        dealer.send(b"")
        dealer.recv()
    dealer.close(0)
    router.close(0)
    here.term()
    over_there.term()
    remove_private_address(address)


def one_way_us(round_trip: RoundTrip, pause_s: float) -> float:
    """Return the median of half a round trip, in microseconds. pause_s: sleep before each."""
    seconds = []
    for _ in range(_COUNT):
        if pause_s:
            time.sleep(pause_s)
        begin = time.perf_counter()
        round_trip()
        seconds.append((time.perf_counter() - begin) / 2)
    return round(percentile(seconds, 0.5) * 1e6, 1)


def measure_wakeups() -> dict[str, Any]:
    """Return for each hop {"awake": microseconds, "idle": microseconds}."""
    found: dict[str, Any] = {}
    for name, hop in (("queue", queues), ("eventfd", eventfds), ("socket", sockets)):
        with hop() as round_trip:
            one_way_us(round_trip, 0.0)
            found[name] = {"awake": one_way_us(round_trip, 0.0), "idle": one_way_us(round_trip, _PAUSE_S)}
    return found
