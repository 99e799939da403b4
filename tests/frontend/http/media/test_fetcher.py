"""Images fetched from servers on this machine: what is connected to, redirects, and the bounds of size and time."""

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from frontend.http.errors import HttpError
from frontend.http.media import fetcher
from frontend.http.media.domains import AllowedDomains
from frontend.http.media.fetcher import MediaFetcher
from ipc.errors import InvalidRequestError

CERTIFICATE = str(Path(__file__).resolve().parents[3] / "data" / "localhost.pem")
BODY = bytes(range(256)) * 40


class Pages(BaseHTTPRequestHandler):
    """Answers by path; the server keeps the Host and the path of each request."""

    def do_GET(self) -> None:
        seen: list[tuple[str, str]] = self.server.seen  # type: ignore[attr-defined]
        seen.append((self.headers["Host"], self.path))
        name, _, rest = self.path[1:].partition("/")
        if name == "to":
            self.send_response(302)
            self.send_header("Location", rest.replace("~", "/"))
            self.end_headers()
        elif name == "endless":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(bytes(1 << 16))
        elif name == "silent":
            self.server.release.wait(20)  # type: ignore[attr-defined]
        else:
            status = int(name) if name.isdecimal() else 200
            self.send_response(status)
            self.send_header("Content-Length", rest or str(len(BODY)))
            if name == "gzip":
                self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            self.wfile.write(BODY)

    def log_message(self, *_: Any) -> None: ...


@contextlib.contextmanager
def pages(context: ssl.SSLContext | None = None) -> Iterator[Any]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    server.seen, server.release = [], threading.Event()  # type: ignore[attr-defined]
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.release.set()  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def server() -> Iterator[Any]:
    with pages() as one:
        yield one


class Names:
    """A name server. Every question about a name gets its next list of addresses; the last one stays."""

    def __init__(self, **answers: Sequence[Sequence[str]]) -> None:
        self.answers = {name.replace("_", "."): list(lists) for name, lists in answers.items()}
        self.asked: list[str] = []

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        lists = self.answers[host]
        return lists.pop(0) if len(lists) > 1 else lists[0]


def fetch(*urls: str, given: Sequence[str] = ("127.0.0.1",), names: Names | None = None, **options: Any) -> list[bytes]:
    async def run() -> list[bytes]:
        one = MediaFetcher(AllowedDomains(given), resolve=None if names is None else names.resolve, **options)
        async with one.fetched(urls, "tenant") as files:
            assert one.num_bytes >= sum(map(len, files.values()))
            got = [files[url] for url in urls]
        assert not one.num_bytes
        return got

    return asyncio.run(run())


def test_files_of_urls(server: Any) -> None:
    at = f"http://127.0.0.1:{server.server_port}"
    assert fetch(f"{at}/a.png?x=1&y=ä b#part", f"{at}/b", f"{at}/b") == [BODY] * 3
    assert sorted(server.seen) == [(at[7:], "/a.png?x=1&y=%C3%A4%20b"), (at[7:], "/b")]  # each once


def test_a_name_is_looked_up_once_and_leads_to_what_was_checked(server: Any) -> None:
    """A name that changes its address between check and connection reaches nothing else."""
    names = Names(images_corp=[["127.0.0.1"], ["127.0.0.2"]])
    url = f"http://images.corp:{server.server_port}/a"
    assert fetch(url, given=["images.corp", "127.0.0.1"], names=names) == [BODY]
    assert names.asked == ["images.corp"]
    assert server.seen == [(f"images.corp:{server.server_port}", "/a")]


@pytest.mark.parametrize("given", [["images.corp"], ["*"], ["images.corp", "10.0.0.0/8"]])
def test_a_name_with_a_private_address_is_not_connected_to(server: Any, given: list[str]) -> None:
    names = Names(images_corp=[["127.0.0.1", "::1", "::ffff:127.0.0.1"]])
    port = "" if given == ["*"] else f":{server.server_port}"
    with pytest.raises(InvalidRequestError, match=r"'images.corp': it has no public address"):
        fetch(f"http://images.corp{port}/a", given=given, names=names)
    assert server.seen == []


def test_the_next_address_of_a_name_is_tried(server: Any) -> None:
    names = Names(images_corp=[["10.0.0.1", "127.0.0.9", "127.0.0.1"]])  # not allowed; nothing there; the server
    url = f"http://images.corp:{server.server_port}/a"
    assert fetch(url, given=["images.corp", "127.0.0.0/8"], names=names) == [BODY]


def test_redirects_are_followed_within_what_is_allowed(server: Any) -> None:
    port = server.server_port
    names = Names(images_corp=[["127.0.0.1"]], other_corp=[["127.0.0.1"]])
    given = ["images.corp", "127.0.0.1"]
    assert fetch(f"http://images.corp:{port}/to/~to~~b", given=given, names=names) == [BODY]
    assert [path for _, path in server.seen] == ["/to/~to~~b", "/to//b", "/b"]
    for target, text in (
        (f"http:~~other.corp:{port}~a", "'other.corp', port .* does not name it"),
        ("http:~~169.254.169.254~latest", "'169.254.169.254', port 80: .* does not name it"),
        ("file:~~~etc~passwd", "must be http:// or https://"),
        ("~to~~to~~to~~b", "redirected more than 3 times"),
    ):
        with pytest.raises(InvalidRequestError, match=text):
            fetch(f"http://images.corp:{port}/to/{target}", given=given, names=names)
    assert "other.corp" not in names.asked


WRONG = {
    "ftp://127.0.0.1/a": "must be http:// or https://",
    "http:///a": "must be http:// or https://",
    "http://user:secret@127.0.0.1/a": "without a user",
    "http://127.0.0.1:x/a": "cannot be read",
    "http://[::1/a": "cannot be read",
    f"http://127.0.0.1/{'a' * 9000}": "at most 8192 characters",
    "http://localhost/a": "does not name it",
}


@pytest.mark.parametrize("url", WRONG)
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError, match=WRONG[url]):
        fetch(url)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("404", "its server answers 404"),
        ("gzip", "sent with coding 'gzip'"),
        ("long/99999999999", "is too large"),
        ("long/20000", "cannot be fetched: RemoteProtocolError"),  # it ends too early
        ("endless", "is too large"),
    ],
)
def test_answers_that_are_refused(server: Any, path: str, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        fetch(f"http://127.0.0.1:{server.server_port}/{path}")


def test_images_of_a_request_are_bounded_together(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    at = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(fetcher, "MOST_BYTES", 2 * len(BODY))
    assert fetch(f"{at}/a", f"{at}/b") == [BODY, BODY]
    with pytest.raises(InvalidRequestError, match=r"have at most \d+ bytes together"):
        fetch(f"{at}/a", f"{at}/b", f"{at}/c")
    with pytest.raises(InvalidRequestError, match="33 images to fetch; at most 32"):
        fetch(*(f"{at}/{number}" for number in range(33)))


def test_time_is_bounded(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    at = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(fetcher, "TOTAL_S", 0.2)
    with pytest.raises(InvalidRequestError, match=r"silent' took too long: .* must arrive in 0\.2 s"):
        fetch(f"{at}/a", f"{at}/silent")


def test_a_host_that_is_not_there(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be fetched: ConnectError"):
        fetch(f"http://127.0.0.9:{server.server_port}/a", given=["127.0.0.9"])

    def fail(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(InvalidRequestError, match=r"'name\.invalid' is not known"):
        fetch("http://name.invalid/a", given=["name.invalid"])


def test_memory_is_shared_between_tenants(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "_LEAST", 1000)
    monkeypatch.setattr(fetcher, "_MOST_OF_TENANT", len(BODY) + 1000)
    monkeypatch.setattr(fetcher, "_MOST_HELD", 2 * len(BODY) + 1500)
    url = f"http://127.0.0.1:{server.server_port}/a"

    async def run() -> None:
        one = MediaFetcher(AllowedDomains(["127.0.0.1"]))

        async def refused(tenant: str) -> None:
            with pytest.raises(HttpError, match="take all the memory") as error:
                async with one.fetched([url], tenant):
                    pass
            assert error.value.status == 503

        async with one.fetched([url], "a"):
            await refused("a")
            async with one.fetched([url], "b"):
                await refused("c")
        assert not one.num_bytes
        async with one.fetched([url], "a") as files:
            assert files == {url: BODY}

    asyncio.run(run())


def test_https_checks_the_name_of_the_url() -> None:
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(CERTIFICATE)
    trusted = ssl.create_default_context(cafile=CERTIFICATE)
    with pages(serving) as server:
        names = Names(localhost=[["127.0.0.1"]], images_corp=[["127.0.0.1"]])
        given = ["localhost", "images.corp", "127.0.0.1"]
        url = f"https://localhost:{server.server_port}/a"
        assert fetch(url, given=given, names=names, ssl_context=trusted) == [BODY]
        with pytest.raises(InvalidRequestError, match="CERTIFICATE_VERIFY_FAILED"):
            fetch(url, given=given, names=names)
        with pytest.raises(InvalidRequestError, match="CERTIFICATE_VERIFY_FAILED"):
            fetch(url.replace("localhost", "images.corp"), given=given, names=names, ssl_context=trusted)


def test_look_ups_need_no_thread_of_others() -> None:
    """Slow look-ups take no thread of the loop's own, on which requests are prepared."""
    release = threading.Event()

    async def run(look_up: Callable[[str, int], Awaitable[Sequence[str]]]) -> list[str]:
        waiting = [asyncio.ensure_future(look_up("a.example", 80)) for _ in range(40)]
        done = await asyncio.gather(*(asyncio.to_thread(str, number) for number in range(40)))
        release.set()
        await asyncio.gather(*waiting)
        return done

    def slow(*_: Any, **__: Any) -> list[Any]:
        release.wait(20)
        return []

    async def main() -> list[str]:
        return await run(fetcher._Resolver().addresses)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", slow)
        assert len(asyncio.run(main())) == 40
