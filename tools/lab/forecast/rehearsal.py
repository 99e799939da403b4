"""A rehearsal: the busiest stretch of recorded traffic, sent over HTTP to an engine on this machine, and recorded.

Its two files say all that a forecast needs: the engine's capture has the steps, the traffic what clients saw. They are
kept in a folder named by what they depend on, so the next forecast of the same day needs no engine.
"""

import asyncio
import contextlib
import platform
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
import uvloop

from frontend.engine.process import EngineProcess
from frontend.http.process.options import HttpOptions
from frontend.http.process.supervised_worker import SupervisedWorker
from frontend.http.wire.listen import bind_http, close_http
from ipc.errors import ConfigError
from ipc.options.config import EngineConfig
from ipc.tables.arrays import Doubles
from ipc.version import VERSION
from tools.commands.record.exchanges import Connection
from tools.commands.record.relay import new_recording
from tools.commands.record.traffic import Exchange, Totals, TrafficWriter
from tools.lab.traces.row import Trace
from tools.lab.traces.workload import make_workload

_VOCAB = 1000  # ids of made-up prompts: every model has as many
_LATE_S = 120.0  # for answers after the last request was sent
_LONGEST = 2**20  # tokens of a request that is rehearsed
_LEAST = 20  # requests: fewer say nothing about deviations


class Rehearsal(msgspec.Struct, frozen=True):
    """The files of a rehearsal."""

    capture: Path
    traffic: Path

    @property
    def is_there(self) -> bool:
        """Return whether it has been held."""
        return self.capture.exists() and self.traffic.exists()


def busiest(trace: Trace, seconds: float) -> Trace:
    """Return the stretch of this length with the most tokens; at least some requests, if the trace has them.

    Errors: ConfigError if all of them are absurdly long.
    """
    fitting = [row for row in trace.rows if row.num_input + row.num_output <= _LONGEST]
    if not fitting:
        raise ConfigError(f"every request of {trace.name} has more than {_LONGEST:,} tokens")
    trace = trace._replace(rows=fitting)
    arrivals = np.array([row.arrival_s for row in trace.rows])
    tokens = np.array([row.num_input + row.num_output for row in trace.rows], np.float64)
    first = _first(arrivals, tokens, seconds)
    end = max(int(np.searchsorted(arrivals, arrivals[first] + seconds, "right")), first + _LEAST)
    rows = trace.rows[max(0, min(first, len(arrivals) - _LEAST)) : end]
    begin = rows[0].arrival_s
    return trace._replace(rows=[row._replace(arrival_s=row.arrival_s - begin) for row in rows])


def _first(arrivals: Doubles, tokens: Doubles, seconds: float) -> int:
    total = np.concatenate([[0.0], tokens.cumsum()])
    ends = np.searchsorted(arrivals, arrivals + seconds, "right")
    return int((total[ends] - total[:-1]).argmax())


def rehearsal_of(folder: Path, config: EngineConfig, trace: Trace) -> Rehearsal:
    """Return the files of a rehearsal of this trace by an engine with these options, held or not."""
    model = Path(config.model) if config.model and config.executor != "fake" else None
    files = [] if model is None else sorted(model.iterdir()) if model.is_dir() else [model]
    changed_ns = [one.stat().st_mtime_ns for one in files]
    parts = [msgspec.json.encode(config), repr((VERSION, platform.node(), changed_ns, trace.rows)).encode()]
    name = blake2b(b"\0".join(parts), digest_size=12).hexdigest()
    return Rehearsal(folder / f"{name}.cap", folder / f"{name}.jsonl")


def hold(rehearsal: Rehearsal, config: EngineConfig, trace: Trace) -> None:
    """Start an engine and its HTTP server, send the requests at their times, and write both files.

    The server refuses requests that are too long for it. Errors: those of an engine's start; ConfigError if the folder
    cannot be written.
    """
    try:
        rehearsal.capture.parent.mkdir(parents=True, exist_ok=True)
        for path in (rehearsal.capture, rehearsal.traffic):  # of a rehearsal that was interrupted
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--rehearsals {rehearsal.capture.parent}: {error.strerror}") from None
    longest = max(row.num_input + max(1, row.num_output) for row in trace.rows)
    workload = make_workload(trace, max_tokens=max(longest, 2), time_scale=1.0, num_clients=1, vocab_size=_VOCAB)
    pairs = zip(trace.rows, workload.requests, strict=True)
    bodies = [request_body(one.message.prompt_token_ids, row.num_output) for row, one in pairs]
    with serving(msgspec.structs.replace(config, capture=str(rehearsal.capture))) as address:
        exchanges = uvloop.run(send_all(address, bodies, [row.arrival_s for row in trace.rows]))
    writer = TrafficWriter(str(rehearsal.traffic), has_content=False)
    writer.add(exchanges)
    writer.close(Totals(0, 0, 0))


@contextlib.contextmanager
def serving(config: EngineConfig) -> Iterator[tuple[str, int]]:
    """Run an engine and its HTTP server; yield host and port. Errors: those of an engine's start."""
    with EngineProcess(config) as engine:
        bound = bind_http("127.0.0.1:0")
        worker = SupervisedWorker(engine.address, [bound], HttpOptions(checks_host=False), print)
        try:
            worker.start()
            yield bound.getsockname()[:2]
        finally:
            worker.stop()
            close_http(bound)
            bound.close()


def request_body(prompt: bytes, num_output: int) -> bytes:
    """Return the body of a streamed completion. prompt: int32, little-endian."""
    return msgspec.json.encode(
        {
            "prompt": np.frombuffer(prompt, "<i4").tolist(),
            "max_tokens": max(1, num_output),
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


async def send_all(address: tuple[str, int], bodies: list[bytes], arrivals: list[float]) -> list[Exchange]:
    """Send each request at its time on a connection of its own; return what was observed, without what failed."""
    recording, begin = new_recording(keeps_content=False), time.monotonic()
    host, port = address

    async def send(body: bytes, arrival: float) -> list[Exchange]:
        await asyncio.sleep(max(0.0, begin + arrival - time.monotonic()))
        reader, writer = await asyncio.open_connection(host, port)
        seen = Connection(recording)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
        data, from_client, found = head.encode() + body, True, list[Exchange]()
        writer.write(data)
        while data and not found:
            seen.feed(data, time.monotonic_ns(), from_client=from_client)
            found = seen.take()
            data, from_client = b"" if found else await reader.read(65_536), False
        writer.close()
        return [one for one in found if one.status == 200]

    tasks = [asyncio.ensure_future(send(*pair)) for pair in zip(bodies, arrivals, strict=True)]
    _, late = await asyncio.wait(tasks, timeout=arrivals[-1] + _LATE_S)
    for task in late:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return [one for task in tasks if task not in late for one in task.result()]
