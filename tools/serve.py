"""`engine-core serve`: an engine in the foreground, for clients that connect to its address.

SIGTERM or SIGINT drains it: new requests are refused, the running ones finish, exit status 0. A second signal notifies
the clients and stops it at once, exit status 143.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence

import uvloop

from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from frontend.engine.process import EngineProcess
from ipc.config import config_from_options
from ipc.errors import EngineCoreError, EngineDeadError, EngineStartError
from tools.control import write_owner_file
from tools.metrics import measuring, served_metrics
from tools.options import ArgumentParser, add_engine_options, engine_options
from tools.start import print_phase

EXIT_STOPPED = 128 + signal.SIGTERM  # stopped before the work was done
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STOP_S = 5.0  # seconds between a second signal and the kill


def main(arguments: Sequence[str]) -> int:
    """Serve until a signal or the owner ends the engine; return the exit status. Errors: ConfigError; a start's."""
    parser = ArgumentParser(
        prog="engine-core serve",
        usage="engine-core serve --listen ADDR [--model PATH] [OPTION ...]",
        description="Run an engine that clients connect to.",
    )
    parser.add_argument(
        "--listen", required=True, metavar="ADDR", help="ipc:///run/user/1000/engine.sock, tcp://127.0.0.1:5555 or so"
    )
    parser.add_argument("--owner-file", metavar="FILE", help="write what `engine-core control` needs to this new file")
    parser.add_argument(
        "--metrics", metavar="ADDR", help="serve Prometheus metrics at http://ADDR/metrics; HOST:PORT or PORT"
    )
    parser.add_argument("--start-timeout", type=float, default=300.0, metavar="S", help="seconds; default: %(default)g")
    add_engine_options(parser)
    parsed = parser.parse_args(arguments)
    config = config_from_options(**measuring(parsed.metrics), **engine_options(parsed))
    process = EngineProcess(config, listen=parsed.listen, start_timeout=parsed.start_timeout, on_phase=print_phase)
    if parsed.owner_file is not None:
        write_owner_file(parsed.owner_file, process.owner_token)
    stop = _Stop(process)
    for number in _SIGNALS:
        signal.signal(number, lambda *_: stop.tell())
    try:
        with served_metrics(parsed.metrics, lambda: process.address) as url:
            return _serve(process, stop, url)
    finally:
        process.close()
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


def _serve(process: EngineProcess, stop: _Stop, metrics: str) -> int:
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
        told = f", metrics at {metrics}" if metrics else ""
        print(f"engine-core: ready at {process.address} ({_describe(process)}, {took_s:.2f} s){told}", flush=True)
    except EngineCoreError:
        if not stop.count:  # a draining engine refuses new clients, which is right
            raise
    return uvloop.run(_watch(process, stop))


def _describe(process: EngineProcess) -> str:
    """Return the model and the size of its KV cache as text, asked for as any client would."""
    client = EngineClient(ZmqTransport(process.address, pidfd=process.pidfd, describe_exit=process.describe_exit))
    try:
        welcome = client.welcome
        return f"{welcome.model_name}, numerics {welcome.numerics}, {client.statistics().num_blocks} blocks"
    finally:
        client.close()


async def _watch(process: EngineProcess, stop: _Stop) -> int:
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
    loop.add_reader(process.pidfd, ended.set)
    await ended.wait()
    loop.remove_reader(process.pidfd)
    process.stop(0)
    if not stop.count and process.exit_code != 0:  # 0: its owner drained it or shut it down
        raise EngineDeadError(process.describe_exit())
    return stop.status
