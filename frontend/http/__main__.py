"""The HTTP worker's process: `python -m frontend.http LEASE_FD REPORT_FD`, started by frontend/http/worker.py.

The lease brings WorkerStart and maybe BEGIN_DRAIN; at its end the worker ends too. The report is one line: "ready", or
why it did not start.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys

import msgspec
import uvloop

from frontend.http.json_log import log_as_json
from frontend.http.options import WorkerStart
from frontend.http.server import HttpServer, open_engine, raise_file_limit
from frontend.session import EngineHandle
from ipc.errors import EngineCoreError
from ipc.pipes import FrameReader


def main() -> int:
    """Serve until the lease ends; return the exit status."""
    lease, report = map(int, sys.argv[1:3])
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal sends them to the owner too, who decides
        signal.signal(number, signal.SIG_IGN)
    start = _read_start(lease)
    if start is None:
        return 0
    if start.options.log_format == "json":
        log_as_json()
    raise_file_limit()
    try:
        engine = open_engine(start.connect)
    except EngineCoreError as error:
        _say(report, str(error))
        return 1
    try:
        uvloop.run(_serve(start, engine, lease, report))
    finally:
        engine.close()
    return 0


def _read_start(lease: int) -> WorkerStart | None:
    """Return the first frame of the lease; None where it ended before."""
    reader = FrameReader()
    while data := os.read(lease, 65_536):
        for frame in reader.feed(data):
            return msgspec.msgpack.decode(frame, type=WorkerStart)
    return None


async def _serve(start: WorkerStart, engine: EngineHandle, lease: int, report: int) -> None:
    server = HttpServer(engine, start.options)
    loop = asyncio.get_running_loop()

    def on_lease() -> None:
        if os.read(lease, 4096):
            server.drain()
        else:
            loop.remove_reader(lease)
            server.stop()

    loop.add_reader(lease, on_lease)
    await server.serve([socket.socket(fileno=fd) for fd in start.fds], lambda: _say(report, "ready"))


def _say(report: int, text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(report, text.encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
