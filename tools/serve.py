"""`engine-core serve`: an engine in the foreground, for clients that connect to its address.

SIGTERM or SIGINT drains it: new requests are refused, the running ones finish, exit status 0. A second signal notifies
the clients and stops it at once, exit status 143.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence

import uvloop

from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from frontend.engine.process import EngineProcess
from frontend.http.listen import bind_http, url_of
from frontend.http.options import HttpOptions
from frontend.http.worker import HttpWorker
from ipc.config import config_from_options
from ipc.errors import EngineCoreError, EngineDeadError, EngineStartError
from tools.control import write_owner_file
from tools.http import add_http_options, check_installed, read_http_options
from tools.options import ArgumentParser, add_engine_options, engine_options
from tools.start import print_phase

EXIT_STOPPED = 128 + signal.SIGTERM  # stopped before the work was done
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STOP_S = 5.0  # seconds between a second signal and the kill


def main(arguments: Sequence[str]) -> int:
    """Serve until a signal or the owner ends the engine; return the exit status. Errors: ConfigError; a start's."""
    parser = ArgumentParser(
        prog="engine-core serve",
        usage="engine-core serve [MODEL] [--http HOST:PORT] [--listen ADDR] [OPTION ...]",
        description="Run an engine that clients connect to, over HTTP, ZeroMQ or both.",
    )
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--http", metavar="HOST:PORT", help="serve OpenAI's API here, such as 127.0.0.1:8000")
    parser.add_argument("--listen", metavar="ADDR", help="ipc:///run/user/1000/engine.sock, tcp://127.0.0.1:5555 or so")
    parser.add_argument("--owner-file", metavar="FILE", help="write what `engine-core control` needs to this new file")
    parser.add_argument("--start-timeout", type=float, default=300.0, metavar="S", help="seconds; default: %(default)g")
    add_http_options(parser)
    add_engine_options(parser)
    parsed = parser.parse_args(arguments)
    if parsed.listen is None and parsed.http is None:
        parser.error("nothing to serve on: give --http HOST:PORT, --listen ADDR or both")
    options = engine_options(parsed)
    if parsed.model_name is not None:
        options["model"] = parsed.model_name
    config = config_from_options(**options)
    front = None
    if parsed.http is not None:
        check_installed()
        front = _Front(bind_http(parsed.http), read_http_options(parsed))
    process = EngineProcess(config, listen=parsed.listen, start_timeout=parsed.start_timeout, on_phase=print_phase)
    if parsed.owner_file is not None:
        write_owner_file(parsed.owner_file, process.owner_token)
    stop = _Stop(process)
    for number in _SIGNALS:
        signal.signal(number, lambda *_: stop.tell())
    try:
        return _serve(process, stop, front)
    finally:
        process.close()
        if front is not None:
            front.close()
        if parsed.owner_file is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(parsed.owner_file)


class _Stopped(BaseException):
    """A signal arrived while the model was being found or downloaded.

    It is a BaseException, like KeyboardInterrupt, so that no library takes it for an error and handles it.
    """


class _Stop:
    """The signals received so far. Handlers are installed before the engine starts and stay until it has ended."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self.count = 0
        self.is_fetching = False  # there is no engine process yet

    def tell(self) -> None:
        """Count one signal, and drain or stop the engine accordingly."""
        self.count += 1
        if self.is_fetching:
            raise _Stopped
        if self.count == 1:
            os.write(2, b"engine-core: draining\n")  # sys.stderr may be in the middle of a line that this interrupts
        if self.count <= 2:
            self._process.drain()

    @property
    def status(self) -> int:
        return EXIT_STOPPED if self.count > 1 else 0


class _Front:
    """The HTTP side of this server: a bound socket, and from the engine's start on a worker that serves it."""

    def __init__(self, bound: socket.socket, options: HttpOptions) -> None:
        self.bound = bound
        self._options = options
        self._worker: HttpWorker | None = None
        self.is_closing = False

    def start(self, address: str) -> None:
        """Start the worker, for the engine at this address. Errors: EngineStartError."""
        self._worker = HttpWorker(address, [self.bound], self._options)
        self._worker.start()

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the worker again when it dies; the socket stays open meanwhile."""
        worker = self._worker
        assert worker is not None

        def again() -> None:
            loop.remove_reader(worker.pidfd)
            worker.stop()
            if not self.is_closing:
                print("engine-core: the HTTP server died and is started again", file=sys.stderr, flush=True)
                worker.start()
                loop.add_reader(worker.pidfd, again)

        loop.add_reader(worker.pidfd, again)

    def close(self) -> None:
        """End the worker and close the socket."""
        self.is_closing = True
        if self._worker is not None:
            self._worker.stop()
        self.bound.close()


def _serve(process: EngineProcess, stop: _Stop, front: _Front | None) -> int:
    begin = time.monotonic()
    try:
        stop.is_fetching = True
        process.start()
        stop.is_fetching = False
        if stop.count:
            process.drain()  # the signal may have come before the process existed
        process.wait_ready()
    except _Stopped:
        return stop.status
    except EngineStartError:
        if stop.count:
            return stop.status
        raise
    try:
        took_s = time.monotonic() - begin
        print(f"engine-core: ready at {process.address} ({_describe(process)}, {took_s:.2f} s)", flush=True)
        if front is not None:
            front.start(process.address)
            print(f"engine-core: HTTP at {url_of(front.bound)}", flush=True)
    except EngineCoreError:
        if not stop.count:  # a draining engine refuses new clients, which is right
            raise
    return uvloop.run(_watch(process, stop, front))


def _describe(process: EngineProcess) -> str:
    """Return the model and the size of its KV cache as text, asked for as any client would."""
    client = EngineClient(ZmqTransport(process.address, pidfd=process.pidfd, describe_exit=process.describe_exit))
    try:
        welcome = client.welcome
        return f"{welcome.model_name}, numerics {welcome.numerics}, {client.statistics().num_blocks} blocks"
    finally:
        client.close()


async def _watch(process: EngineProcess, stop: _Stop, front: _Front | None) -> int:
    """Wait until the engine process has ended; return the exit status. Errors: EngineDeadError if it crashed."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def limit() -> None:
        if stop.count > 1:
            loop.call_later(_STOP_S, ended.set)

    def on_signal() -> None:
        stop.tell()
        limit()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    limit()  # for signals before
    if front is not None:
        front.watch(loop)
    loop.add_reader(process.pidfd, ended.set)
    await ended.wait()
    loop.remove_reader(process.pidfd)
    process.stop(0)
    if not stop.count and process.exit_code != 0:  # 0: its owner drained it or shut it down
        raise EngineDeadError(process.describe_exit())
    return stop.status
