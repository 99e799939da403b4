"""What a flood of tiny valid messages costs a witness's stream: its messages a second next to a client in a tight loop.

Steps take no time, so the witness's rate is the limit of the engine process. "busy" is a client that only computes: its
effect is the machine's, since engine, witness and client share its cores.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from core.executors.fake_options import with_fake_options
from frontend.engine.process import EngineProcess
from ipc.options.config import EngineConfig
from ipc.version import NAME, VERSION
from ipc.wire.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, Abort, Heartbeat, Hello, encode
from tools.lab.bench.callers.hostile import HostileClient, busy, measure_case, tiny_request

_FLOOD_S = 3.0


def _loop(*frames: bytes) -> Callable[[HostileClient], None]:
    def send(client: HostileClient) -> None:
        end = time.monotonic() + _FLOOD_S
        while time.monotonic() < end:
            client.send(*frames)

    return send


def _requests(client: HostileClient) -> None:
    """Send requests of one token, whose answers are not read."""
    number, end = 0, time.monotonic() + _FLOOD_S
    while time.monotonic() < end:
        client.send(*(tiny_request(number + more, 1) for more in range(16)))
        number += 16


FLOODS: dict[str, Callable[[HostileClient], None]] = {
    "nothing": lambda client: time.sleep(_FLOOD_S),
    "busy": busy,
    "heartbeats": _loop(encode(Heartbeat())),
    "Aborts of one unknown number": _loop(encode(Abort(np.arange(1, dtype="<u4").tobytes(), b""))),
    "Hello again": _loop(encode(Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "again"))),
    "requests of one token": _requests,
}


def measure_floods(config: EngineConfig, *, rep: int) -> Iterator[dict[str, Any]]:
    """Yield a record for each flood: the witness's messages a second, and its longest gap in ms."""
    config = with_fake_options(config, max_model_len=1_000_000)
    for name, flood in FLOODS.items():
        with EngineProcess(config) as engine:
            found = measure_case(engine.address, flood)
        names = {"engine": NAME, "version": VERSION, "workload": "floods", "rep": rep, "case": name}
        yield {
            **names,
            "messages_s": round(found.rate),
            "longest_gap_ms": round(found.longest.seconds * 1e3, 1),
            "cpu_wait_ms": round(found.longest.cpu_wait * 1e3, 1),
            "p99_gap_ms": round(found.p99 * 1e3, 2),
        }
