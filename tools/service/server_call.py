"""call_server: one request to a running HTTP server, for commands about its models."""

import json
import os
import urllib.error
import urllib.request
from typing import Any

from ipc.errors import ConfigError
from tools.flags.options import ArgumentParser

DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 60.0


def add_url(parser: ArgumentParser) -> None:
    """Add the flag that names the server."""
    parser.add_argument(
        "--url",
        default=DEFAULT_URL,
        metavar="URL",
        help="the server's address; ENGINE_CORE_API_KEY is its key; default: %(default)s",
    )


def call_server(url: str, method: str, path: str, body: object = None) -> Any:
    """Return the JSON of an answer. Errors: ConfigError for a server that is not there, or that refuses."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url must be a URL such as {DEFAULT_URL}; got {url!r:.80}")
    headers = {"content-type": "application/json"}
    if key := os.environ.get("ENGINE_CORE_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url.rstrip("/") + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise ConfigError(f"{url} answered {error.code}: {_message(error.read())}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"no server with many models answers at {url}: {getattr(error, 'reason', error)}") from None


def _message(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]
