"""The HTTP worker's process: `python -m frontend.http`, started by frontend/http/worker.py.

Standard input is its lease on life and brings its messages, a JSON line each: first Start, later maybe "drain". At its
end the worker ends too. Standard output gets one line when the worker serves.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys

import msgspec
import uvloop

from frontend.http.options import WorkerStart
from frontend.http.server import HttpServer, raise_file_limit
from frontend.session import EngineHandle
from ipc.errors import EngineCoreError


def main() -> int:
    """Serve until the lease ends; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the owner too, who decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    start = msgspec.json.decode(line, type=WorkerStart)
    raise_file_limit()
    try:
        engine = open_engine(start.connect)
    except EngineCoreError as error:
        _report(f"failed {error}")
        return 1
    try:
        return uvloop.run(_serve(start, engine))
    finally:
        engine.close()


def open_engine(address: str, client_name: str = "http", connect_timeout: float = 10.0) -> EngineHandle:
    """Return a session with the engine at this address. Errors: those of EngineHandle."""
    return EngineHandle(
        None,
        connect=address,
        seed=None,
        tokenizer=None,
        skip_tokenizer=False,
        start_timeout=0.0,
        connect_timeout=connect_timeout,
        client_name=client_name,
        options={},
    )


async def _serve(start: WorkerStart, engine: EngineHandle) -> int:
    server = HttpServer(engine, start.options)
    loop = asyncio.get_running_loop()

    def on_lease() -> None:
        data = os.read(0, 4096)
        if data:
            server.drain()
        else:
            loop.remove_reader(0)
            server.stop()

    loop.add_reader(0, on_lease)
    await server.serve([socket.socket(fileno=fd) for fd in start.fds], lambda: _report("ready"))
    return 0


def _report(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
