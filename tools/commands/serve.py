"""`engine-core serve`: an engine in the foreground, for clients that connect to its address.

An engine that dies is restarted, and its clients' requests continue (docs/operations.md). SIGTERM, SIGINT or SIGHUP
drains it: new requests are refused, the running ones finish, exit status 0. A second signal notifies the clients and
stops it at once, exit status 143, which is also that of a drain that cut answers over HTTP. Under nohup, SIGHUP stays
ignored. If the engine dies too often, the exit status is 1.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

import uvloop

from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from frontend.engine.death import Cause
from frontend.engine.process import EngineProcess, OnPhase
from frontend.engine.restart_policy import RestartRules
from frontend.engine.signs import DEFAULT_HANG_S
from frontend.engine.standby_plan import StandbyKind
from frontend.engine.supervised_engine import SupervisedEngine
from ipc.errors import ConfigError, EngineCoreError, EngineDeadError, EngineStartError
from ipc.log_lines import LogFormat, counted, log_line
from ipc.options.config import EngineConfig
from ipc.options.given_options import config_from_options
from ipc.options.workers import master_address, num_machines
from ipc.wire.sockets import held_private_address
from tools.commands.control import write_owner_file
from tools.commands.http import HttpFront, add_http_options, http_address
from tools.flags.address import default_address, fresh_owner_file
from tools.flags.options import ArgumentParser, add_engine_options, bytes_argument, engine_options
from tools.service.metrics import measuring, served_metrics
from tools.service.notify import keep_watchdog, notify
from tools.service.start import phase_printer

EXIT_STOPPED = 128 + signal.SIGTERM  # stopped before the work was done
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_STOP_S = 5.0  # seconds between a second signal and the kill


def main(arguments: Sequence[str]) -> int:
    """Serve until a signal or the owner ends the engine; return the exit status.

    Errors: ConfigError; those of a start.
    """
    parsed = _parse(arguments)
    options = measuring(parsed.metrics or parsed.http) | engine_options(parsed)
    if parsed.model_name is not None:
        options["model"] = parsed.model_name
    if parsed.models is not None:
        # Imported here: it imports what tells the sizes of models, which this process does not need otherwise.
        from tools.commands.serve_models import serve_models

        parsed.log_format = options.get("log_format", "text")
        return serve_models(parsed, options, _teller_in(parsed.log_format))
    config = config_from_options(**options)
    if parsed.node_rank:
        # Imported here: it imports parts of the engine that this process does not need otherwise.
        from tools.commands.worker import run_node

        return run_node(master_address(config), parsed.node_rank, config.model)
    standby = _standby(parsed, config)
    if parsed.listen is None and parsed.http is not None:
        with held_private_address() as address:  # one for all engines, one after the other
            return _run(parsed, config, standby, address)
    if parsed.listen is None:
        parsed.listen, parsed.owner_file = default_address(), parsed.owner_file or fresh_owner_file()
    return _run(parsed, config, standby, parsed.listen)


def _run(parsed: argparse.Namespace, config: EngineConfig, standby: StandbyKind, address: str) -> int:
    """Serve at this address; return the exit status."""
    process = EngineProcess(
        config,
        listen=address,
        start_timeout=parsed.start_timeout,
        on_phase=_phase_teller(config),
        resume_s=parsed.resume_timeout if parsed.restarts > 0 else 0.0,
    )
    if parsed.owner_file is not None:
        write_owner_file(parsed.owner_file, process.owner_token)  # its descriptor stays open, and so locked
    rules = RestartRules(most=max(0, parsed.restarts))
    engine = SupervisedEngine(process, rules, hang_s=parsed.hang_timeout, standby=standby, on_news=_teller(config))
    stop = _Stop(engine)
    for number in stop.signals:
        signal.signal(number, lambda *_: stop.tell())
    try:
        with contextlib.ExitStack() as stack:
            url = stack.enter_context(served_metrics(parsed.metrics, lambda: process.last_address, engine))
            front = None if parsed.http is None else stack.enter_context(HttpFront(parsed, _teller(config)))
            return _serve(engine, stop, url, front)
    finally:
        engine.close()
        if parsed.owner_file is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(parsed.owner_file)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = ArgumentParser(
        prog="engine-core serve",
        usage="engine-core serve [MODEL | --models FILE] [--http HOST:PORT] [--listen ADDR] [OPTION ...]",
        description="Run an engine that clients connect to, over HTTP, ZeroMQ or both.",
    )
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument(
        "--models",
        metavar="FILE|FOLDER|NAMES",
        help="serve several models: a TOML file, a folder of models, or names with commas between them "
        "(docs/many_models.md)",
    )
    parser.add_argument(
        "--memory",
        type=bytes_argument,
        metavar="BYTES",
        help="with --models: memory for all models; default: 80 %% of the machine's",
    )
    parser.add_argument("--http", metavar="HOST:PORT", help="serve OpenAI's API here, such as 127.0.0.1:8000")
    parser.add_argument(
        "--listen",
        metavar="ADDR",
        help="ipc:///run/user/1000/engine.sock, tcp://127.0.0.1:5555 and similar; default: a socket of this user, "
        "which other commands also use; with --http a private one",
    )
    parser.add_argument("--owner-file", metavar="FILE", help="write what `engine-core control` needs to this new file")
    parser.add_argument(
        "--metrics", metavar="ADDR", help="serve Prometheus metrics at http://ADDR/metrics; HOST:PORT or PORT"
    )
    parser.add_argument(
        "--node-rank",
        type=int,
        default=0,
        metavar="N",
        help="above 0: run workers for the engine at --master-addr, on another machine, as `engine-core worker` does",
    )
    parser.add_argument("--start-timeout", type=float, default=300.0, metavar="S", help="seconds; default: %(default)g")
    _add_restart_options(parser)
    add_http_options(parser)
    add_engine_options(parser)
    parsed: argparse.Namespace = parser.parse_args(arguments)
    parsed.http = http_address(parser, parsed)
    return parsed


def _add_restart_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--restarts",
        type=int,
        default=RestartRules().most,
        metavar="N",
        help="most restarts of an engine that dies, within a minute; 0 = none; default: %(default)d",
    )
    parser.add_argument(
        "--hang-timeout",
        type=float,
        default=DEFAULT_HANG_S,
        metavar="S",
        help="a step hangs if it has run for this many seconds and for 20 times the slowest step of its size; the "
        "engine is then killed and restarted; 0 = never; default: %(default)g",
    )
    parser.add_argument(
        "--standby",
        choices=[kind.value for kind in StandbyKind],
        default=StandbyKind.NO.value,
        help="keep a second process that takes over if the engine dies: import = it has imported its modules; model "
        "= it has also loaded the model, which needs its memory twice; default: %(default)s",
    )
    parser.add_argument(
        "--resume-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds that clients wait for the next engine; must be longer than a start; default: %(default)g",
    )


def _standby(parsed: argparse.Namespace, config: EngineConfig) -> StandbyKind:
    """Return how far a standby is prepared. Errors: ConfigError for a standby that this engine cannot have."""
    kind = StandbyKind(parsed.standby)
    if kind is not StandbyKind.NO and parsed.restarts <= 0:
        raise ConfigError(
            f"--standby {kind.value} is for restarts, and --restarts 0 allows none: leave one of them out"
        )
    if kind is StandbyKind.MODEL and num_machines(config) > 1:
        raise ConfigError("--standby model does not support workers on other machines (--nnodes): use --standby import")
    if kind is StandbyKind.MODEL and config.device == "cuda":
        raise ConfigError("--standby model would load a second model into the GPU's memory: use --standby import")
    return kind


class _Stopped(BaseException):
    """A signal arrived while the model was being located or downloaded.

    It is a BaseException, like KeyboardInterrupt, so that no library handles it as an error.
    """


class _Stop:
    """The signals received so far. Handlers are installed before the engine starts and stay until it has ended."""

    def __init__(self, engine: SupervisedEngine) -> None:
        self._engine = engine
        self.count = 0
        self.signals = tuple(number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN)
        self.is_fetching = False  # there is no engine process yet

    def tell(self) -> None:
        """Count a signal, and drain or stop the engine accordingly."""
        self.count += 1
        if self.is_fetching:
            raise _Stopped
        if self.count == 1:
            line = log_line(self._engine.process.config.log_format, "engine-core: draining", {})
            os.write(2, f"{line}\n".encode())  # the signal may have interrupted a write to sys.stderr
            notify("STOPPING=1")
        if self.count <= 2:
            self._engine.drain()

    @property
    def status(self) -> int:
        return EXIT_STOPPED if self.count > 1 else 0


def _serve(engine: SupervisedEngine, stop: _Stop, metrics: str, front: HttpFront | None) -> int:
    process = engine.process
    begin = time.monotonic()
    try:
        stop.is_fetching = True
        engine.start()
        stop.is_fetching = False
        if stop.count:
            engine.drain()  # the signal may have arrived before the process existed
        engine.wait_ready()
    except _Stopped:
        return stop.status
    except EngineStartError:
        if stop.count:
            return stop.status
        raise
    try:
        took_s = time.monotonic() - begin
        told = f", metrics at {metrics}" if metrics else ""
        text = f"engine-core: ready at {process.address} ({_describe(process)}, {took_s:.2f} s){told}"
        print(log_line(process.config.log_format, text, {}), flush=True)
        if front is not None:
            front.start(process.address)
            print(log_line(process.config.log_format, f"engine-core: HTTP at {front.url}", {}), flush=True)
        elif sys.stderr.isatty():
            print("engine-core: without HTTP; --port 8000 adds OpenAI's API", file=sys.stderr, flush=True)
        notify(f"READY=1\nSTATUS={text.removeprefix('engine-core: ')}")
    except EngineCoreError:
        if not stop.count:  # a draining engine refuses new clients, which is right
            raise
    status = uvloop.run(_watch(engine, stop, front))
    return EXIT_STOPPED if front is not None and front.end() else status


def _describe(process: EngineProcess) -> str:
    """Return the model and the size of its KV cache as text, by a client's call."""
    client = EngineClient(ZmqTransport(process.address, pidfd=process.pidfd, describe_exit=process.describe_exit))
    try:
        welcome = client.welcome
        return f"{welcome.model_name}, numerics {welcome.numerics}, {counted(client.statistics().num_blocks, 'block')}"
    finally:
        client.close()


def _teller(config: EngineConfig) -> Callable[[str], None]:
    """Return a function that prints a line of news in the log's format."""
    return _teller_in(config.log_format)


def _teller_in(form: LogFormat) -> Callable[[str], None]:
    def tell(text: str) -> None:
        print(log_line(form, f"engine-core: {text}", {}), file=sys.stderr, flush=True)

    return tell


def _phase_teller(config: EngineConfig) -> OnPhase:
    show = phase_printer(config.log_format)

    def tell(name: str, seconds: float) -> None:
        show(name, seconds)
        notify(f"STATUS=starting: {name}")

    return tell


async def _watch(engine: SupervisedEngine, stop: _Stop, front: HttpFront | None) -> int:
    """Wait until the engine has ended and is not restarted; return the exit status. Errors: EngineDeadError if it
    crashed.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def limit() -> None:
        if stop.count > 1:
            loop.call_later(_STOP_S, ended.set)

    def on_signal() -> None:
        stop.tell()
        if front is not None:
            front.drain()
        limit()

    # Not add_signal_handler(): it would count a signal again that the loop has heard of and the first handler counted.
    before = {number: signal.signal(number, lambda *_: loop.call_soon_threadsafe(on_signal)) for number in stop.signals}
    limit()  # for earlier signals
    keep_watchdog(loop)
    if front is not None:
        front.watch(loop)
    loop.add_reader(engine.ended_fd, ended.set)
    await ended.wait()
    loop.remove_reader(engine.ended_fd)
    for number, handler in before.items():
        signal.signal(number, handler)
    engine.close(0)
    if not stop.count and engine.last_cause is not Cause.ENDED:  # ended: its owner drained it or shut it down
        raise EngineDeadError(engine.describe_end())
    return stop.status
