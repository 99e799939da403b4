"""The HTTP worker's process: `python -m frontend.http LEASE_FD REPORT_FD`, started by frontend/http/process/worker.py.

The lease sends WorkerStart and maybe BEGIN_DRAIN; when it closes, the worker ends too. The report is one line, "ready"
or why it did not start, and after "ready" a byte for each second in which the loop turned.
"""

import gc

if __name__ == "__main__":
    gc.disable()  # until the modules are loaded: it would look through what stays, a fifth of the time

import asyncio
import contextlib
import faulthandler
import os
import signal
import socket
import sys
from functools import partial

import msgspec
import uvloop

from frontend.http.process.json_log import log_as_json
from frontend.http.process.options import EXIT_CUT, MANY, READY, TURNED, WorkerStart
from frontend.http.wire.server import HttpServer, one_model, open_engine, raise_file_limit
from ipc.errors import EngineCoreError
from ipc.wire.pipes import FrameReader

#: Seconds after which a thread that computes gives Python's lock to the loop, if the loop waits for it.
_SWITCH_S = 0.001


def main() -> int:
    """Serve until the lease ends; return the exit status, EXIT_CUT if that cut answers."""
    sys.setswitchinterval(_SWITCH_S)
    lease, report = map(int, sys.argv[1:3])
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the owner sends it to a hung worker to see its stacks
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal also sends them to the owner, which decides
        signal.signal(number, signal.SIG_IGN)
    start, is_draining = _read_start(lease)
    if start is None:
        return 0
    if start.options.log_format == "json":
        log_as_json()
    raise_file_limit()
    try:
        if start.connect.startswith(MANY):
            has_cut = uvloop.run(_serve_many(start, lease, report, is_draining=is_draining))
        else:
            has_cut = _serve_one(start, lease, report, is_draining=is_draining)
    except EngineCoreError as error:  # of the engine's session, or of the store of responses
        _write(report, f"{error}\n".encode())
        return 1
    return EXIT_CUT if has_cut else 0


def _serve_one(start: WorkerStart, lease: int, report: int, *, is_draining: bool) -> bool:
    engine = open_engine(start.connect)
    try:

        async def serve() -> bool:
            server = HttpServer(start.options, one_model(engine, start.options))
            return await _serve(server, start, lease, report, is_draining=is_draining)

        return uvloop.run(serve())
    finally:
        engine.close()


async def _serve_many(start: WorkerStart, lease: int, report: int, *, is_draining: bool) -> bool:
    from frontend.http.many.link import HostLink  # a server with one model needs none of this
    from frontend.http.many.many_models import ManyModels
    from frontend.http.many.pages import many_routes

    link = await HostLink.open(start.connect.removeprefix(MANY))
    server = HttpServer(start.options, partial(ManyModels, link=link), many_routes())
    return await _serve(server, start, lease, report, is_draining=is_draining)


def _read_start(lease: int) -> tuple[WorkerStart | None, bool]:
    """Return the first frame of the lease (None if the lease ended first), and whether BEGIN_DRAIN followed."""
    reader = FrameReader()
    while data := os.read(lease, 65_536):
        if frames := reader.feed(data):
            return msgspec.msgpack.decode(frames[0], type=WorkerStart), len(frames) > 1
    return None, False


async def _serve(server: HttpServer, start: WorkerStart, lease: int, report: int, *, is_draining: bool) -> bool:
    if is_draining:
        server.drain()
    loop = asyncio.get_running_loop()

    def on_lease() -> None:
        if os.read(lease, 4096):
            server.drain()
        else:
            loop.remove_reader(lease)
            server.stop()

    loop.add_reader(lease, on_lease)
    os.set_blocking(report, False)  # a stopped owner must not block the worker
    sockets = [socket.socket(fileno=fd) for fd in start.fds]
    await server.serve(sockets, lambda: _write(report, READY), lambda: _write(report, TURNED))
    return server.has_cut


def _write(report: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, BlockingIOError):
        os.write(report, data)


if __name__ == "__main__":
    gc.freeze()  # nor does it look through the modules later
    gc.enable()
    sys.exit(main())
