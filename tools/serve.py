"""`engine-core serve`: an engine in the foreground, for clients that connect to its address.

SIGTERM or SIGINT drains it: no new requests, the running ones finish, exit status 0. A second one stops it at once.
"""

import asyncio
import signal
import sys
import time
from collections.abc import Sequence

import uvloop

from frontend.client import EngineClient
from frontend.engine_process import EngineProcess
from frontend.transport import ZmqTransport
from ipc.config import config_from_options
from ipc.errors import EngineDeadError
from tools.options import ArgumentParser, add_engine_options, engine_options
from tools.start import print_phase

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STOP_S = 5.0  # seconds an engine that was told twice gets before it is killed


def main(arguments: Sequence[str]) -> int:
    parser = ArgumentParser(
        prog="engine-core serve",
        usage="engine-core serve --listen ADDR [--model PATH] [OPTION ...]",
        description="Run an engine that clients connect to.",
    )
    parser.add_argument(
        "--listen", required=True, metavar="ADDR", help="ipc:///run/user/1000/engine.sock, tcp://127.0.0.1:5555 or so"
    )
    parser.add_argument("--start-timeout", type=float, default=300.0, metavar="S", help="seconds; default: %(default)g")
    add_engine_options(parser)
    parsed = parser.parse_args(arguments)
    config = config_from_options(**engine_options(parsed))
    process = EngineProcess(config, listen=parsed.listen, start_timeout=parsed.start_timeout, on_phase=print_phase)
    try:
        begin = time.monotonic()
        _start(process)
        print(
            f"engine-core: ready at {process.address} ({_describe(process)}, {time.monotonic() - begin:.2f} s)",
            flush=True,
        )
        return uvloop.run(_watch(process))
    except _Stopped:
        return 0
    finally:
        process.close()


class _Stopped(BaseException):
    """A signal came before the engine was ready. Like KeyboardInterrupt no error that a library may catch."""


def _start(process: EngineProcess) -> None:
    def stop(number: int, frame: object) -> None:
        raise _Stopped

    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        process.start()
        process.wait_ready()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _describe(process: EngineProcess) -> str:
    """The model and the size of its KV cache, asked for as any client would."""
    client = EngineClient(ZmqTransport(process.address, pidfd=process.pidfd, describe_exit=process.describe_exit))
    try:
        welcome = client.welcome
        return f"{welcome.model_name}, numerics {welcome.numerics}, {client.statistics().num_blocks} blocks"
    finally:
        client.close()


async def _watch(process: EngineProcess) -> int:
    """Until the engine process has ended; the exit status. Errors: EngineDeadError if nobody asked it to."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    num_signals = 0

    def on_signal() -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals == 1:
            print("engine-core: draining", file=sys.stderr, flush=True)
            process.drain()
        else:
            ended.set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    loop.add_reader(process.pidfd, ended.set)
    await ended.wait()
    loop.remove_reader(process.pidfd)
    if num_signals > 1:
        process.stop(_STOP_S)
        return 0
    if not num_signals:
        raise EngineDeadError(process.describe_exit())
    return 0
