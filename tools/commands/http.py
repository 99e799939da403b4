"""`engine-core http`: an HTTP server with OpenAI's API for a running engine."""

import argparse
import asyncio
import importlib.util
import ipaddress
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import uvloop

from frontend.calls.choose import choose_form
from frontend.engine.signs import DEFAULT_HANG_S
from frontend.http.callers.keys import digest_of, read_keys
from frontend.http.media.domains import AllowedDomains
from frontend.http.process.options import EXIT_CUT, HttpOptions
from frontend.http.process.supervised_worker import SupervisedWorker
from frontend.http.stored.database import MIN_STORE_BYTES, Database
from frontend.http.wire.listen import UNIX, bind_http, close_http, is_loopback, is_unix, url_of
from ipc.errors import ConfigError
from ipc.keys.signing import SigningKey
from ipc.log_lines import log_line
from tools.flags.options import ArgumentParser, bytes_argument

if TYPE_CHECKING:
    from frontend.session import EngineHandle

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
_NEEDED = ("httptools", "python_multipart", "uvicorn")


def main(arguments: Sequence[str]) -> int:
    """Serve until a signal; return the exit status, EXIT_CUT if stopping cut answers.

    Errors: ConfigError, AddressError; those of a connection.
    """
    parser = ArgumentParser(
        prog="engine-core http",
        usage="engine-core http --connect ADDR [--http HOST:PORT] [OPTION ...]",
        description="Serve a running engine over HTTP.",
    )
    parser.add_argument("--connect", required=True, metavar="ADDR", help="the engine's address, of `engine-core serve`")
    parser.add_argument("--http", metavar="HOST:PORT", help="default: 127.0.0.1:8000")
    parser.add_argument(
        "--chat-template",
        "--chat-template-file",
        metavar="FILE",
        help="a chat template, or a file with one, instead of the engine's; with `serve` it is an engine option",
    )
    parser.add_argument("--log-format", choices=("text", "json"), default="text", help="format of the access log")
    add_http_options(parser)
    parsed = parser.parse_args(arguments)
    parsed.http = http_address(parser, parsed) or f"{DEFAULT_HOST}:{DEFAULT_PORT}"
    check_installed()
    from frontend.http.wire.server import open_engine, raise_file_limit  # needs the extra

    options = read_http_options(parsed)
    with bind_http(parsed.http) as bound:
        raise_file_limit()
        open_ = partial(open_engine, parsed.connect, chat_template=parsed.chat_template)
        has_cut = uvloop.run(_serve(open_, parsed.connect, options, bound))
    return EXIT_CUT if has_cut else 0


def add_http_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of HttpOptions in a group."""
    group = parser.add_argument_group("HTTP options")
    group.add_argument("--host", metavar="HOST", help=f"with --port instead of --http; default: {DEFAULT_HOST}")
    group.add_argument("--port", type=int, metavar="N", help=f"with --host instead of --http; default: {DEFAULT_PORT}")
    group.add_argument("--uds", metavar="PATH", help="listen at this file (a Unix socket) instead of a port")
    add_wire_options(group)
    group.add_argument(
        "--served-model-name",
        "--alias",
        "-a",
        nargs="+",
        default=[],
        metavar="NAME",
        help="the model's names; default: the engine's",
    )
    _add_key_options(group)
    group.add_argument("--allowed-hosts", nargs="+", default=[], metavar="NAME", help="further names in Host headers")
    group.add_argument(
        "--allowed-origins",
        nargs="+",
        default=[],
        metavar="URL",
        help="origins whose pages may read answers; '*' = all",
    )
    group.add_argument(
        "--max-body-bytes", type=bytes_argument, metavar="BYTES", help="largest body of a request; default: 8M"
    )
    group.add_argument("--max-connections", type=int, metavar="N", help="default: 20000")
    group.add_argument(
        "--drain-timeout", type=float, metavar="S", help="seconds for running answers to finish; default: 60"
    )
    group.add_argument(
        "--allow-request-templates", action="store_true", help="accept chat templates, which are programs, in requests"
    )
    group.add_argument(
        "--enable-prompt-embeds", action="store_true", help="take prompts that are embeddings, in /v1/completions"
    )
    group.add_argument(
        "--enable-force-include-usage",
        action="store_true",
        help="report the usage in every event of a stream",
    )
    group.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        help="how the model writes calls: hermes, llama3_json, mistral, ... (docs/http.md); default: by its template",
    )
    group.add_argument(
        "--reasoning-parser", metavar="NAME", help="how the model marks reasoning: qwen3, ...; none = it is content"
    )
    group.add_argument(
        "--access-log", action="store_true", help="write a line for each request at its end, on standard error"
    )
    add_receipt_key(group)
    _add_store_options(group)
    group.add_argument(
        "--otlp-traces-endpoint", metavar="URL", help="send OpenTelemetry spans there: http://HOST:4318/v1/traces"
    )
    group.add_argument("--enable-auto-tool-choice", action="store_true", help="no effect: the request's tools decide")


def _add_key_options(group: argparse._ArgumentGroup) -> None:
    keys = "a file of lines NAME SHA256 [LIMIT=VALUE ...], see docs/http.md; read again when it changes"
    group.add_argument("--api-key-file", metavar="FILE", help=keys)
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="prefer ENGINE_CORE_API_KEY: others can see arguments",
    )
    group.add_argument("--insecure", action="store_true", help="serve other machines without keys")
    group.add_argument(
        "--allowed-media-domains",
        nargs="+",
        default=[],
        metavar="DOMAIN",
        help="fetch images of http(s) URLs from these hosts: example.org, *.example.org, '*', 10.0.0.7, 10.0.0.0/8; "
        "without it no URL is fetched",
    )


def _add_store_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--store", metavar="FILE", help="keep responses of /v1/responses in this file, which is not encrypted"
    )
    group.add_argument(
        "--store-bytes", type=bytes_argument, metavar="BYTES", help="largest size of that file; default: 1G"
    )
    group.add_argument(
        "--store-key-bytes",
        type=bytes_argument,
        metavar="BYTES",
        help="most that one key may keep in it; default: a quarter of --store-bytes",
    )
    group.add_argument(
        "--max-file-bytes", type=bytes_argument, metavar="BYTES", help="largest upload to /v1/files; default: 200M"
    )
    group.add_argument(
        "--batch-requests",
        type=int,
        metavar="N",
        help="requests of batches that run at the same time; default: half of --max-num-seqs",
    )
    group.add_argument(
        "--store-days", type=float, metavar="N", help="days for which a response is kept, 0 = without end; default: 30"
    )


def add_receipt_key(group: Any) -> None:
    """Add the flag that names the key of receipts."""
    group.add_argument(
        "--receipt-key", metavar="FILE", help="sign receipts with this key, of `engine-core keys receipts`"
    )


def add_wire_options(group: Any) -> None:
    """Add the flags of TLS and of a proxy in front."""
    group.add_argument("--ssl-certfile", metavar="FILE", help="serve HTTPS with this certificate (PEM)")
    group.add_argument(
        "--ssl-keyfile", metavar="FILE", help="the certificate's key (PEM); default: the key in --ssl-certfile"
    )
    group.add_argument(
        "--ssl-ca-certs",
        metavar="FILE",
        help="callers must present a certificate signed by one of these authorities (PEM)",
    )
    group.add_argument(
        "--root-path", default="", metavar="/PATH", help="the path under which a proxy serves this server"
    )
    group.add_argument(
        "--forwarded-allow-ips",
        nargs="+",
        default=[],
        metavar="IP",
        help="proxies (addresses, networks, '*') whose X-Forwarded-For is trusted for the access log",
    )


def read_wire_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of HttpOptions that these flags set. Errors: ConfigError."""
    root = parsed.root_path.rstrip("/")
    if root and (not root.startswith("/") or not root.isascii() or any(one in root for one in "?#% ")):
        raise ConfigError(f"--root-path is a path such as /llm; got {parsed.root_path!r:.80}")
    files = {name: getattr(parsed, name) for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")}
    files = {name: None if path is None else os.path.abspath(path) for name, path in files.items()}
    if files["ssl_certfile"] is not None:
        _check_certificate(files["ssl_certfile"], files["ssl_keyfile"], files["ssl_ca_certs"])
    elif any(files.values()):
        raise ConfigError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile, the certificate to serve with")
    proxies = tuple(one for text in parsed.forwarded_allow_ips for one in text.split(",") if one)
    for proxy in proxies:
        _check_proxy(proxy)
    return {**files, "root_path": root, "forwarded_allow_ips": proxies}


def _check_certificate(certificate: str, key: str | None, authorities: str | None) -> None:
    """Check that these files are usable. Errors: ConfigError."""
    context, name = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), "--ssl-certfile"
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")  # no prompt for a password
        name = "--ssl-ca-certs"
        if authorities is not None:
            context.load_verify_locations(authorities)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        text = getattr(error, "strerror", None) or error
        raise ConfigError(f"{name}: {text}; the files must be PEM, and the key must have no password") from None


def _check_proxy(text: str) -> None:
    """Check that this is an address or a network, or * for all. Errors: ConfigError."""
    try:
        if text != "*":
            ipaddress.ip_network(text)
    except ValueError as error:
        raise ConfigError(f"--forwarded-allow-ips takes addresses and networks, such as 10.0.0.0/8: {error}") from None


def otlp_endpoint(url: str | None) -> str | None:
    """Return the URL. Errors: ConfigError if it is not a URL, or if OpenTelemetry is not installed."""
    if url is not None and not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"--otlp-traces-endpoint must be a URL such as http://127.0.0.1:4318/v1/traces; got {url!r:.80}"
        )
    if url is not None and not _has_open_telemetry():
        raise ConfigError(
            "--otlp-traces-endpoint needs OpenTelemetry: pip install opentelemetry-sdk "
            "opentelemetry-exporter-otlp-proto-http, or engine-core with its extra [otel]"
        )
    return url


def read_receipt_key(path: str | None) -> str | None:
    """Return the absolute path of a key that signs receipts. Errors: ConfigError if it has none."""
    if path is not None:
        SigningKey(path)  # for its errors
    return None if path is None else os.path.abspath(path)


def read_store(path: str | None) -> str | None:
    """Return the absolute path of a file of stored responses. Errors: ConfigError if it cannot be used."""
    if path is None:
        return None
    Database(os.path.abspath(path), MIN_STORE_BYTES, 0).close()  # for its errors
    return os.path.abspath(path)


def read_media_domains(given: Sequence[str]) -> tuple[str, ...]:
    """Return the hosts that images may be fetched from. Errors: ConfigError for what is no host, and without a client
    for HTTP.
    """
    domains = tuple(one for text in given for one in text.split(",") if one)
    AllowedDomains(domains)  # for its errors
    if domains and (importlib.util.find_spec("httpcore2") is None or importlib.util.find_spec("anyio") is None):
        raise ConfigError(
            "--allowed-media-domains needs httpcore2 and anyio: pip install 'httpcore2[asyncio]', or engine-core with "
            "its extra [media]"
        )
    return domains


def _has_open_telemetry() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http.trace_exporter") is not None
    except ModuleNotFoundError:
        return False


def http_address(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> str | None:
    """Return the HTTP server's address from --http, or --host and --port; None = none of them is given."""
    address: str | None = parsed.http
    if parsed.uds is not None:
        if (address, parsed.host, parsed.port) != (None, None, None):
            parser.error("--uds is an address by itself: give only one of --uds, --http, or --host and --port")
        return f"{UNIX}{os.path.abspath(parsed.uds)}"
    if parsed.host is None and parsed.port is None:
        return address
    if address is not None:
        parser.error("--http means --host and --port together: give --http or those two")
    host = DEFAULT_HOST if parsed.host is None else parsed.host
    return f"{f'[{host}]' if ':' in host else host}:{DEFAULT_PORT if parsed.port is None else parsed.port}"


def read_http_options(parsed: argparse.Namespace) -> HttpOptions:
    """Return the options that these flags and ENGINE_CORE_API_KEY set. Errors: ConfigError, AddressError."""
    if parsed.api_key:
        print("engine-core: warning: --api-key shows the key to all users of this machine", file=sys.stderr, flush=True)
    secrets = [*parsed.api_key, *filter(None, [os.environ.get("ENGINE_CORE_API_KEY")])]
    is_local, has_keys = is_loopback(parsed.http), bool(secrets) or parsed.api_key_file is not None
    if not is_local and not has_keys and not parsed.insecure:
        raise ConfigError(
            f"--http {parsed.http} is open to other machines without keys: give --api-key-file, set "
            "ENGINE_CORE_API_KEY, or add --insecure"
        )
    if parsed.api_key_file is not None:
        read_keys(parsed.api_key_file)
    choose_form(None, parsed.tool_call_parser, parsed.reasoning_parser)  # for its errors
    given: dict[str, Any] = {
        "served_model_names": tuple(parsed.served_model_name),
        "allow_request_templates": parsed.allow_request_templates,
        "key_digests": tuple(map(digest_of, secrets)),
        "api_key_file": None if parsed.api_key_file is None else os.path.abspath(parsed.api_key_file),
        "checks_host": is_local and not is_unix(parsed.http),
        "allowed_hosts": tuple(name.lower() for name in parsed.allowed_hosts),
        "allowed_origins": tuple(parsed.allowed_origins),
        "allowed_media_domains": read_media_domains(parsed.allowed_media_domains),
        "enable_prompt_embeds": parsed.enable_prompt_embeds,
        "include_usage": parsed.enable_force_include_usage,
        "hang_timeout": getattr(parsed, "hang_timeout", DEFAULT_HANG_S),  # of `engine-core serve`
        "receipt_key": read_receipt_key(parsed.receipt_key),
        "access_log": parsed.access_log,
        "otlp_traces_endpoint": otlp_endpoint(parsed.otlp_traces_endpoint),
        "log_format": getattr(parsed, "log_format", "text"),
        "store": read_store(parsed.store),
        "tool_call_parser": parsed.tool_call_parser,
        "reasoning_parser": parsed.reasoning_parser,
        **read_wire_options(parsed),
    }
    lows = {"max_body_bytes": 1024, "max_connections": 1, "drain_timeout": 0, "store_bytes": MIN_STORE_BYTES}
    lows |= {"store_key_bytes": 1, "max_file_bytes": 1024, "batch_requests": 1}
    for name, low in {**lows, "store_days": 0}.items():
        if (value := getattr(parsed, name)) is not None:
            if not low <= value <= 2**40:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least {low}; got {value}")
            given[name] = value
    return HttpOptions(**given)


class HttpFront:
    """The HTTP side of `engine-core serve`: a bound socket, and after start() a worker that serves it.

    It binds at once, so that a port in use is an error before a model loads. on_news: called with a line of text each
    time a worker dies. Errors: ConfigError, AddressError.
    """

    def __init__(self, parsed: argparse.Namespace, on_news: Callable[[str], None]) -> None:
        check_installed()
        self._tell = on_news
        self._options = read_http_options(parsed)
        self._bound = bind_http(parsed.http)
        self.url = url_of(self._bound, has_tls=self._options.ssl_certfile is not None)
        self._worker: SupervisedWorker | None = None

    def start(self, address: str) -> None:
        """Start the worker, for the engine at this address. Errors: EngineStartError."""
        self._worker = SupervisedWorker(address, [self._bound], self._options, self._tell)
        self._worker.start()

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Replace a worker that dies or hangs, until drain()."""
        assert self._worker is not None, "watch() before start()"
        self._worker.watch(loop)

    @property
    def has_ended(self) -> bool:
        """Return whether the worker has ended after drain()."""
        return self._worker is not None and self._worker.has_ended

    def drain(self) -> None:
        """Accept no more requests; the worker ends after the last answer. Does not wait."""
        if self._worker is not None:
            self._worker.drain()

    def end(self) -> bool:
        """Stop the worker and wait for its end; return whether that, or an earlier drain, cut answers."""
        if self._worker is None:
            return False
        self._worker.stop()
        return self._worker.has_cut

    def __enter__(self) -> "HttpFront":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        close_http(self._bound)
        self._bound.close()


def check_installed() -> None:
    """Check that the extra's packages are installed. Errors: ConfigError that names it."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        names = " ".join(missing)
        raise ConfigError(f"HTTP needs {names}: pip install {names}, or engine-core with its extra [http]")


async def _serve(
    open_engine: "Callable[[], EngineHandle]", address: str, options: HttpOptions, bound: socket.socket
) -> bool:
    """Serve the engines at this address until a signal; return whether stopping cut answers."""
    from frontend.http.process.comeback import EngineFollower  # these need the extra
    from frontend.http.wire.server import HttpServer, one_model

    engine, loop = open_engine(), asyncio.get_running_loop()
    server = HttpServer(options, one_model(engine, options))
    url = url_of(bound, has_tls=options.ssl_certfile is not None)

    def on_signal() -> None:
        if server.is_draining:
            server.stop()
        server.drain()

    def tell(text: str) -> None:
        print(log_line(options.log_format, f"engine-core: {text}", {}), file=sys.stderr, flush=True)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    follower = EngineFollower(server, engine, options, open_engine)
    following = asyncio.create_task(follower.follow(address, tell))
    try:
        await server.serve([bound], lambda: print(f"engine-core: HTTP at {url}", flush=True))
    finally:
        following.cancel()
        follower.engine.close()
    return server.has_cut
