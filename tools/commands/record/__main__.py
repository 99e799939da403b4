"""`engine-core record`: a proxy that changes nothing and writes down how a server is used, without the content."""

import argparse
import asyncio
import signal
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import uvloop

from frontend.http.wire.listen import bind_http, close_http, is_loopback, url_of
from ipc.errors import ConfigError
from tools.commands.http import check_installed
from tools.commands.record.traffic import TrafficWriter
from tools.flags.options import ArgumentParser

if TYPE_CHECKING:
    from tools.commands.record.relay import Relay

_MOST_CONNECTIONS = 65_536


def main(arguments: Sequence[str]) -> int:
    """Relay until SIGINT or SIGTERM; return 0. Errors: ConfigError, AddressError."""
    check_installed()
    from frontend.http.wire.server import raise_file_limit  # these need the extra [http]
    from tools.commands.record.relay import Observer, Relay, new_recording, parse_upstream

    parsed = _parser().parse_args(arguments)
    if not 1 <= parsed.max_connections <= _MOST_CONNECTIONS:
        raise ConfigError(f"--max-connections must be from 1 to {_MOST_CONNECTIONS}; got {parsed.max_connections}")
    upstream = parse_upstream(parsed.upstream, parsed.host_header)
    if not is_loopback(parsed.listen, "--listen") and not parsed.insecure:
        raise ConfigError(
            f"--listen {parsed.listen} is open to other machines, and the proxy passes on everything: add --insecure "
            "if the server checks keys itself"
        )
    bound = bind_http(parsed.listen)
    try:
        writer = TrafficWriter(parsed.output, has_content=parsed.content)
        raise_file_limit()
        observer = Observer(writer, new_recording(keeps_content=parsed.content), _tell)
        try:
            uvloop.run(_serve(Relay(upstream, observer, parsed.max_connections), bound, parsed.upstream))
        finally:
            observer.close()
    finally:
        close_http(bound)
        bound.close()
    _tell(f"{observer.num_exchanges} exchanges in {parsed.output}")
    return 0


async def _serve(relay: "Relay", bound: socket.socket, upstream: str) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    server = await loop.create_server(relay.protocol, sock=bound)
    print(f"engine-core: recording at {url_of(bound)} in front of {upstream}", flush=True)
    await stopped.wait()
    server.close()
    relay.cut()
    await relay.observer.read_all()


def _tell(text: str) -> None:
    print(f"engine-core: {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="engine-core record",
        usage="engine-core record --upstream URL --listen ADDR --output FILE [...]",
        description="Pass everything between clients and a server with the API of OpenAI, Anthropic or Ollama on, byte "
        "for byte, and write lengths, times and shared beginnings of its requests to a file for `engine-core "
        "forecast`. No text and no key is written.",
    )
    parser.add_argument("--upstream", required=True, metavar="URL", help="the server, such as http://127.0.0.1:8080")
    parser.add_argument(
        "--listen", required=True, metavar="ADDR", help="HOST:PORT or unix:PATH that clients use instead"
    )
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the file to write; it must not exist")
    parser.add_argument("--content", action="store_true", help="also write the requests' bodies and the answers' texts")
    parser.add_argument(
        "--max-connections", type=int, default=1024, metavar="N", help="connections at a time; default: 1024"
    )
    parser.add_argument(
        "--host-header",
        choices=("keep", "upstream"),
        help="the header Host: as clients send it, or the upstream's name; default: keep; upstream for https",
    )
    parser.add_argument("--insecure", action="store_true", help="listen on an address that other machines can reach")
    return parser
