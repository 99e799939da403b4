"""`engine-core http`: an HTTP server for an engine that runs already, with OpenAI's API."""

import argparse
import asyncio
import importlib.util
import signal
from collections.abc import Sequence
from typing import Any

import uvloop

from frontend.http.listen import bind_http, url_of
from frontend.http.options import HttpOptions
from ipc.errors import ConfigError
from tools.options import ArgumentParser, parse_bytes

_NEEDED = ("uvicorn", "httptools")


def main(arguments: Sequence[str]) -> int:
    """Serve until a signal; return the exit status. Errors: ConfigError, AddressError; those of a connection."""
    parser = ArgumentParser(
        prog="engine-core http",
        usage="engine-core http --connect ADDR [--http HOST:PORT] [OPTION ...]",
        description="Serve a running engine over HTTP.",
    )
    parser.add_argument("--connect", required=True, metavar="ADDR", help="the engine's address, of `engine-core serve`")
    parser.add_argument("--http", default="127.0.0.1:8000", metavar="HOST:PORT", help="default: %(default)s")
    add_http_options(parser)
    parsed = parser.parse_args(arguments)
    check_installed()
    from frontend.http.__main__ import open_engine  # needs the extra
    from frontend.http.server import HttpServer, raise_file_limit

    options = read_http_options(parsed)
    with bind_http(parsed.http) as bound:
        raise_file_limit()
        engine = open_engine(parsed.connect)
        try:
            uvloop.run(_serve(HttpServer, engine, options, bound))
        finally:
            engine.close()
    return 0


def add_http_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of HttpOptions in a group."""
    group = parser.add_argument_group("HTTP options")
    group.add_argument(
        "--served-model-name", nargs="+", default=[], metavar="NAME", help="the model's names; default: the engine's"
    )
    group.add_argument("--max-body-bytes", type=parse_bytes, metavar="BYTES", help="of a request; default: 8M")
    group.add_argument("--max-connections", type=int, metavar="N", help="default: 20000")
    group.add_argument("--drain-timeout", type=float, metavar="S", help="for running answers at the end; default: 60")
    group.add_argument(
        "--allow-request-templates", action="store_true", help="take chat templates, which are programs, from requests"
    )
    group.add_argument(
        "--enable-force-include-usage", action="store_true", help="report the usage at the end of every stream"
    )


def read_http_options(parsed: argparse.Namespace) -> HttpOptions:
    """Return the options that these flags give. Errors: ConfigError."""
    given: dict[str, Any] = {
        "served_model_names": tuple(parsed.served_model_name),
        "allow_request_templates": parsed.allow_request_templates,
        "include_usage": parsed.enable_force_include_usage,
    }
    for name, low in (("max_body_bytes", 1024), ("max_connections", 1), ("drain_timeout", 0)):
        if (value := getattr(parsed, name)) is not None:
            if not low <= value <= 2**40:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least {low}; got {value}")
            given[name] = value
    return HttpOptions(**given)


def check_installed() -> None:
    """Check that the packages of the extra are there. Errors: ConfigError that names it."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"HTTP needs {' and '.join(missing)}: pip install 'llm-engine-core[http]'")


async def _serve(kind: Any, engine: Any, options: HttpOptions, bound: Any) -> None:
    server, loop = kind(engine, options), asyncio.get_running_loop()

    def on_signal() -> None:
        if server.service.is_draining:
            server.stop()
        server.drain()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await server.serve([bound], lambda: print(f"engine-core: HTTP at {url_of(bound)}", flush=True))
