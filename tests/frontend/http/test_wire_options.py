"""TLS, Unix sockets, a proxy in front, and what pages of other origins may do."""

import contextlib
import http.client
import json
import os
import re
import socket
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from frontend.http.callers.access_log import access_line
from frontend.http.request import Request
from frontend.http.wire.listen import bind_http, close_http, url_of
from ipc.errors import AddressError
from tests.frontend.http.caller import serving, wait_for
from tools.cli import main

CERTIFICATE = str(Path(__file__).resolve().parents[2] / "data" / "localhost.pem")
FAKE = ("--executor", "fake", "--executor-option", "vocab_size=1000")
BODY = json.dumps({"prompt": [1, 2], "max_tokens": 30, "stream": True, "ignore_eos": True}).encode()
JSON = {"content-type": "application/json"}


@contextlib.contextmanager
def streamed(connection: http.client.HTTPConnection) -> Iterator[list[bytes]]:
    """The events of a stream on a connection, which takes a second request."""
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", BODY, JSON)
        response = connection.getresponse()
        assert response.status == 200
        events = response.read().split(b"\n\n")
        connection.request("GET", "/live")
        assert connection.getresponse().status == 200
        yield events


@pytest.mark.parametrize("wants_certificate", [False, True])
def test_tls(wants_certificate: bool) -> None:
    """Streams over HTTPS; with --ssl-ca-certs only for callers that show a certificate."""
    options = ("--ssl-certfile", CERTIFICATE, *(("--ssl-ca-certs", CERTIFICATE) if wants_certificate else ()))
    with serving(*FAKE, *options, scheme="https") as caller:
        context = ssl.create_default_context(cafile=CERTIFICATE)
        if wants_certificate:
            answer = b""
            with (
                contextlib.suppress(ssl.SSLError, ConnectionError),  # the refusal comes behind the handshake
                caller.socket() as peer,
                context.wrap_socket(peer, server_hostname="localhost") as without,
            ):
                without.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
                answer = without.recv(100)
            assert answer == b""
            context.load_cert_chain(CERTIFICATE)
        with streamed(http.client.HTTPSConnection("localhost", caller.port, context=context, timeout=30)) as events:
            assert events[-2] == b"data: [DONE]"
        assert not caller.raw(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n").startswith(b"HTTP/1.1 200")


def test_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "http.sock")
    with serving(*FAKE, "--uds", path, http=None):
        connection = http.client.HTTPConnection("site.example", timeout=30)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(path)
        with streamed(connection) as events:
            assert events[-2] == b"data: [DONE]"
    assert not os.path.exists(path)


def test_a_file_of_a_dead_server_is_replaced_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with bind_http(f"unix:{path}") as bound:
        assert url_of(bound) == f"unix:{path}"
        with pytest.raises(AddressError, match="in use"):
            bind_http(f"unix:{path}")
    assert stat.S_ISSOCK(path.stat().st_mode)  # it was not removed: as after a kill
    with bind_http(f"unix:{path}") as bound:
        close_http(bound)
        assert not path.exists()
    path.write_text("precious")
    with pytest.raises(AddressError, match="in use"):
        bind_http(f"unix:{path}")
    assert path.read_text() == "precious"


@pytest.mark.parametrize("client", ["", "http.sock"])
def test_a_root_path_and_a_trusted_proxy(client: str) -> None:
    """Paths count with the prefix and without; the log has the address that a trusted proxy tells."""
    options = ("--root-path", "/llm/", "--forwarded-allow-ips", "127.0.0.0/8", "--access-log")
    with serving(*FAKE, *options) as caller:
        told = {"x-forwarded-for": client or "203.0.113.7, 127.0.0.1", "x-forwarded-proto": "https"}
        for path in ("/v1/models", "/llm/v1/models"):
            assert caller.get(path, told).status == 200
        assert caller.get("/llm/llm/v1/models").status == 404
        assert caller.get("/llmv1/models").status == 404
        assert caller.get("/openapi.json").json["servers"] == [{"url": "/llm"}]
        assert caller.process.stderr is not None
        lines = list[str]()

        def is_logged() -> bool:
            lines.append(caller.process.stderr.readline())  # type: ignore[union-attr]
            return "route=/v1/models" in lines[-1]

        wait_for(is_logged)
        assert (" client=203.0.113.7 " in lines[-1]) is not bool(client)
        assert bool(re.search("client=[^0-9]", lines[-1])) is False


def test_nobody_tells_another_address_by_default() -> None:
    request = Request("GET", "/x", b"/x", b"", {}, None, num_hosts=1, client="127.0.0.1")  # type: ignore[arg-type]
    assert " client=127.0.0.1 " in access_line("text", request, 200, None, 0.0)
    request.client = "1.2.3.4 status=500"
    assert "1.2.3.4" not in access_line("text", request, 200, None, 0.0)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--ssl-keyfile", "x"), "need --ssl-certfile"),
        (("--ssl-certfile", "/nowhere.pem"), "--ssl-certfile: No such file"),
        (("--ssl-certfile", __file__), "the files must be PEM"),
        (("--ssl-certfile", CERTIFICATE, "--ssl-ca-certs", __file__), "--ssl-ca-certs: "),
        (("--root-path", "llm"), "--root-path is a path"),
        (("--forwarded-allow-ips", "proxy.example"), "--forwarded-allow-ips takes addresses"),
        (("--uds", "x", "--port", "1"), "--uds is an address by itself"),
    ],
)
def test_wrong_options_are_refused_by_name(
    options: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    address = () if "--uds" in options else ("--http", "127.0.0.1:0")
    try:
        status = main(["http", "--connect", "ipc:///nowhere", *address, *options])
    except SystemExit as end:
        status = int(end.code or 0)
    assert status != 0
    assert told in capsys.readouterr().err


def test_a_page_of_an_allowed_origin_may_send_what_its_client_adds() -> None:
    """The headers that the official JavaScript clients send, and what they read of an answer."""
    origin = {"origin": "http://app.local:3000"}
    names = "authorization,content-type,x-stainless-lang,anthropic-version,openai-organization"
    asks = {"access-control-request-method": "POST", "access-control-request-headers": names}
    with serving(*FAKE, "--allowed-origins", origin["origin"]) as caller:
        answer = caller.call("OPTIONS", "/v1/chat/completions", None, {**origin, **asks})
        assert (answer.status, answer.headers["access-control-allow-headers"]) == (204, names)
        assert answer.headers["access-control-allow-origin"] == origin["origin"]
        answer = caller.call("OPTIONS", "/v1/messages", None, {**origin, **asks, "access-control-request-headers": "@"})
        assert answer.headers["access-control-allow-headers"].startswith("authorization, ")
        exposed = caller.get("/v1/models", origin).headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "retry-after", "x-ratelimit-remaining-tokens"} <= set(exposed)
        other = caller.call("OPTIONS", "/v1/models", None, {**asks, "origin": "http://other.example"})
        assert (other.status, "access-control-allow-headers" in other.headers) == (405, False)
