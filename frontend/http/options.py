"""HttpOptions: the options of an HTTP server, as the command line and a parent process give them."""

import msgspec

DEFAULT_MAX_BODY_BYTES = 8 << 20


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one HTTP server. served_model_names: names that callers may give the model; empty = the engine's."""

    served_model_names: tuple[str, ...] = ()
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_connections: int = 20_000
    allow_request_templates: bool = False  # a chat template is a program
    include_usage: bool = False  # in every stream, also where it was not asked for
    drain_timeout: float = 60.0  # seconds for running answers when the server ends


class WorkerStart(msgspec.Struct, frozen=True):
    """What a worker process is told first. fds: the listening sockets that it inherits."""

    connect: str
    fds: tuple[int, ...]
    options: HttpOptions
