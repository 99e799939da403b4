"""HttpOptions: the options of an HTTP server, as the command line and a parent process give them."""

import msgspec

from ipc.log_lines import LogFormat

DEFAULT_MAX_BODY_BYTES = 8 << 20


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one HTTP server. served_model_names: names that callers may give the model; empty = the engine's."""

    served_model_names: tuple[str, ...] = ()
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_connections: int = 20_000
    allow_request_templates: bool = False  # a chat template is a program
    include_usage: bool = False  # in every event of a stream, also where it was not asked for
    tool_call_parser: str | None = (
        None  # how the model writes calls (frontend/calls/formats.py); None = by its template
    )
    reasoning_parser: str | None = None
    key_digests: tuple[str, ...] = ()  # SHA-256, hex, of keys without limits
    api_key_file: str | None = None
    checks_host: bool = True  # the server listens on this machine only, so that it knows its names
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()  # of pages in browsers; "*" = all
    root_path: str = ""  # under which a proxy has this server: "/llm"
    forwarded_allow_ips: tuple[str, ...] = ()  # addresses or networks of proxies whose X-Forwarded-For is believed
    ssl_certfile: str | None = None  # PEM: the server's certificate and those behind it; None = no TLS
    ssl_keyfile: str | None = None  # PEM; None = the key is in ssl_certfile
    ssl_ca_certs: str | None = None  # PEM: callers must show a certificate of one of these; None = they need none
    access_log: bool = False  # a line for each request at its end
    log_format: LogFormat = "text"
    otlp_traces_endpoint: str | None = None  # URL of a collector of OpenTelemetry's spans; None = none are made
    drain_timeout: float = 60.0  # seconds for running answers when the server ends
    hang_timeout: float = (
        5.0  # seconds after which /health may call the engine hung (frontend/engine/signs.py); 0 = never
    )


#: The exit status of a server whose end cut answers: that of a program that SIGTERM ended.
EXIT_CUT = 143
#: What a worker is told, after its start, to let it take no more requests and end after the last answer.
BEGIN_DRAIN = bytes(4)  # a frame without content, which may come right behind the start message
#: A worker's first words, where it serves; else a line with the reason why it does not.
READY = b"ready\n"
#: What a worker that serves writes to its report once a second, whenever its loop turns.
TURNED = b"."


class WorkerStart(msgspec.Struct, frozen=True):
    """What a worker process is told first. fds: the listening sockets that it inherits."""

    connect: str
    fds: tuple[int, ...]
    options: HttpOptions
