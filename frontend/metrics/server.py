"""MetricsServer: GET /metrics over HTTP, for a Prometheus that scrapes an engine without an HTTP server."""

import ipaddress
import sys
import threading
from collections.abc import Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from ipc.errors import AddressError

_HOST = "127.0.0.1"
_TEXT = "text/plain; version=0.0.4"  # the page's only format, whatever a scraper accepts
_SILENCE_S = 5.0  # that a connection may be silent


class MetricsServer:
    """Serves a registry until close(). address: HOST:PORT, :PORT or PORT; the host is 127.0.0.1 unless it is given.

    Any client that reaches the address may read the metrics. If the address is local, a Host header must name this
    machine, so that no web page can reach it under a name of its own. Errors: AddressError.
    """

    def __init__(self, address: str, registry: CollectorRegistry) -> None:
        host, port = _split(address)
        try:
            self._server = _Server((host, port), RequestHandler)
        except OSError as error:
            raise AddressError(f"metrics cannot be served at {address}: {error.strerror}") from None
        app = make_wsgi_app(registry)
        is_local = _is_loopback(host)

        def only_metrics(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            if is_local and not _names_this_machine(environ.get("HTTP_HOST", "")):
                start_response("421 Misdirected Request", [("Content-Type", "text/plain")])
                return [b"this server is not the host of this name\n"]
            if environ["PATH_INFO"] == "/metrics" and environ["REQUEST_METHOD"] in ("GET", "HEAD"):
                # prometheus_client renames metrics for some values of Accept; names here are an interface.
                return app({**environ, "HTTP_ACCEPT": _TEXT}, start_response)  # type: ignore[no-any-return]
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"GET /metrics\n"]

        self._server.set_app(only_metrics)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Return the address of the metrics."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}/metrics"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Bind without the look-up of the host's name, which may take seconds."""
        self.server_name, self.server_port = "localhost", 0
        self.socket.setsockopt(1, 2, 1)  # SOL_SOCKET, SO_REUSEADDR
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_port = self.server_address[1]
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a peer that is slow or leaves; print other errors."""
        if not isinstance(sys.exception(), OSError):  # TimeoutError and ConnectionError are such errors
            super().handle_error(request, client_address)


class RequestHandler(WSGIRequestHandler):
    """Reads a request for at most `timeout` seconds, and writes no log."""

    timeout = _SILENCE_S

    def log_message(self, *args: object) -> None:
        """Log nothing: a scrape every few seconds is normal."""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _names_this_machine(host: str) -> bool:
    """Return whether a Host header has an address of this machine alone, or is missing, as programs may omit it."""
    name, _, port = host.rpartition(":")
    return host == "" or _is_loopback((name if name and port.isdigit() else host).strip("[]").lower())


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise AddressError(
            f"an address of metrics must be HOST:PORT or PORT, such as 127.0.0.1:9400; got {address!r:.80}"
        )
    return host or _HOST, int(port)
