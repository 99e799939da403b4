"""HttpOptions: the options of an HTTP server, from the command line or a parent process."""

import msgspec

from ipc.log_lines import LogFormat

DEFAULT_MAX_BODY_BYTES = 8 << 20
DEFAULT_STORE_BYTES = 1 << 30
DEFAULT_MAX_FILE_BYTES = 200 << 20


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one HTTP server. served_model_names: names that callers may give the model; empty = the engine's."""

    served_model_names: tuple[str, ...] = ()
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_connections: int = 20_000
    allow_request_templates: bool = False  # a chat template is a program
    allowed_media_domains: tuple[str, ...] = ()  # from which images are fetched (frontend/http/media/domains.py)
    enable_prompt_embeds: bool = False  # take prompts that are matrices, which are as long as tokens times hidden
    include_usage: bool = False  # in every event of a stream, even if not requested
    tool_call_parser: str | None = (
        None  # how the model writes calls (frontend/calls/formats.py); None = by its template
    )
    reasoning_parser: str | None = None
    key_digests: tuple[str, ...] = ()  # SHA-256, hex, of keys without limits
    api_key_file: str | None = None
    checks_host: bool = True  # the server listens on this machine only, so that it knows its names
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()  # of pages in browsers; "*" = all
    system: str | None = None  # the system message of chats that have none
    root_path: str = ""  # path under which a proxy serves this server: "/llm"
    forwarded_allow_ips: tuple[str, ...] = ()  # addresses or networks of proxies whose X-Forwarded-For is trusted
    ssl_certfile: str | None = None  # PEM: the server's certificate chain; None = no TLS
    ssl_keyfile: str | None = None  # PEM; None = the key is in ssl_certfile
    ssl_ca_certs: str | None = None  # PEM: callers must show a certificate of one of these; None = they need none
    receipt_key: str | None = None  # PEM: the key that signs receipts; None = they are not signed
    access_log: bool = False  # a line for each request at its end
    log_format: LogFormat = "text"
    otlp_traces_endpoint: str | None = None  # URL of a collector of OpenTelemetry spans; None = no spans
    store: str | None = None  # path of the file that keeps responses; None = none are kept
    store_bytes: int = DEFAULT_STORE_BYTES  # of that file
    store_key_bytes: int | None = None  # that one key may use of them; None = a quarter
    store_days: float = 30.0  # how long a response is kept; 0 = without end
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES  # of an upload to the store
    batch_requests: int | None = None  # of all batches at the same time; None = half of the engine's rows
    drain_timeout: float = 60.0  # seconds for running answers when the server ends
    hang_timeout: float = (
        5.0  # seconds after which /health may call the engine hung (frontend/engine/signs.py); 0 = never
    )


#: The start of an address at which a host of many models listens (frontend/http/many/host.py).
MANY = "models:"
#: The exit status of a server that cut answers when it stopped: as for a program ended by SIGTERM.
EXIT_CUT = 143
#: Tells a started worker to accept no more requests and end after the last answer.
BEGIN_DRAIN = bytes(4)  # a frame without content, which may directly follow the start message
#: A worker's first report if it serves; otherwise a line with the reason why it does not.
READY = b"ready\n"
#: Written by a serving worker to its report once a second, as long as its loop turns.
TURNED = b"."


class WorkerStart(msgspec.Struct, frozen=True):
    """The first message to a worker process. connect: the engine's address, or MANY and the socket of a host of models.
    fds: the listening sockets that it inherits.
    """

    connect: str
    fds: tuple[int, ...]
    options: HttpOptions
