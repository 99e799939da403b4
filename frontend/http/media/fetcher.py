"""MediaFetcher: the images of http:// and https:// URLs, fetched from allowed hosts within bounds.

A host is checked where it is connected to: the address that was checked is the one that is opened, and each redirect is
a new connection. No proxy of the environment is used, and nothing is sent but the URL.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote, urljoin, urlsplit

import httpcore2

from frontend.http.errors import HttpError, retry_after
from frontend.http.media.domains import AllowedDomains, address_of
from frontend.images.sources import MAX_FILE_BYTES
from ipc.errors import InvalidRequestError
from ipc.version import VERSION

#: Bounds of one request: seconds for all its images, their number, and their bytes.
TOTAL_S, MOST_URLS, MOST_BYTES = 15.0, 32, MAX_FILE_BYTES
_CONNECT_S = 5.0
_MOST_REDIRECTS = 3
_MOST_TRIED = 4  # addresses of one host
_LOOK_UPS = 16  # names at the same time
_AT_ONCE = 4  # images of one request
_MOST_URL_CHARS = 8192
#: Bytes in memory of all requests and of those of one tenant. A request counts as at least _LEAST.
_MOST_HELD, _MOST_OF_TENANT, _LEAST = 256 << 20, 128 << 20, 1 << 20
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
_SAFE = "/%:@!$&'()*+,;=~-._?"  # of a URL's path and query

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class _Target(NamedTuple):
    """Where a request goes. path: with the query, percent-encoded."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """Return the field Host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


class MediaFetcher:
    """domains: what may be connected to. resolve: a name's addresses, of tests. ssl_context: None = the system's
    authorities. Created in the event loop that it is used in.
    """

    def __init__(
        self, domains: AllowedDomains, *, resolve: Resolve | None = None, ssl_context: Any | None = None
    ) -> None:
        self._domains = domains
        self._backend = _CheckedBackend(domains, resolve or _Resolver().addresses)
        self._ssl_context = ssl_context
        self._held: dict[str, int] = {}  # bytes, by tenant

    @property
    def num_bytes(self) -> int:
        """Return the memory that is counted for files of all tenants."""
        return sum(self._held.values())

    @contextlib.asynccontextmanager
    async def fetched(self, urls: Iterable[str], tenant: str) -> AsyncIterator[Mapping[str, bytes]]:
        """Return the files of these URLs; their memory is counted until the context is left.

        Errors: InvalidRequestError; HttpError 503 while others' images take the memory.
        """
        wanted = list(dict.fromkeys(urls))
        if len(wanted) > MOST_URLS:
            raise InvalidRequestError(f"{len(wanted)} images to fetch; at most {MOST_URLS} are fetched for a request")
        files = _Files(self, tenant)
        try:
            files.take(_LEAST)
            yield await self._fetch_all(wanted, files)
        finally:
            files.close()

    async def _fetch_all(self, urls: Sequence[str], files: "_Files") -> Mapping[str, bytes]:
        slots = asyncio.Semaphore(_AT_ONCE)

        async def fetch(url: str) -> None:
            async with slots:
                files.by_url[url] = await self._fetch(url, files)

        try:
            async with asyncio.timeout(TOTAL_S), asyncio.TaskGroup() as group:
                for url in urls:
                    group.create_task(fetch(url))
        except TimeoutError:
            missing = next(url for url in urls if url not in files.by_url)
            raise InvalidRequestError(
                f"the image {missing!r:.200} took too long: a request's images must arrive in {TOTAL_S:g} s"
            ) from None
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return files.by_url

    async def _fetch(self, url: str, files: "_Files") -> bytes:
        """Return the file of a URL. Errors: InvalidRequestError, HttpError."""
        if self._ssl_context is None:
            self._ssl_context = httpcore2.default_ssl_context()  # takes milliseconds, so once
        at = url
        try:
            async with httpcore2.AsyncConnectionPool(
                ssl_context=self._ssl_context, max_keepalive_connections=0, network_backend=self._backend
            ) as pool:
                for _ in range(_MOST_REDIRECTS + 1):
                    target = _target_of(at)
                    self._domains.check_host(target.host, target.port)
                    async with pool.stream(
                        "GET",
                        httpcore2.URL(
                            scheme=target.scheme, host=target.host, port=target.port, target=target.path.encode()
                        ),
                        headers=[
                            ("Host", target.authority),
                            ("User-Agent", f"engine-core/{VERSION}"),
                            ("Accept", "image/*"),
                            ("Accept-Encoding", "identity"),
                        ],
                        extensions={"timeout": {"connect": _CONNECT_S, "read": TOTAL_S, "write": TOTAL_S}},
                    ) as answer:
                        if answer.status not in _REDIRECTS:
                            return await _read(answer, url, files)
                        at = urljoin(at, _header(answer, b"location"))
        except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException) as error:
            raise InvalidRequestError(
                f"the image {url!r:.200} cannot be fetched: {type(error).__name__} ({error!s:.100})"
            ) from None
        raise InvalidRequestError(f"the image {url!r:.200} is redirected more than {_MOST_REDIRECTS} times")

    def take(self, tenant: str, size: int) -> None:
        """Count bytes of a tenant. Errors: HttpError 503."""
        of_tenant = self._held.get(tenant, 0)
        if self.num_bytes + size > _MOST_HELD or of_tenant + size > _MOST_OF_TENANT:
            raise HttpError(503, "fetched images take all the memory for them", headers=retry_after(1000))
        self._held[tenant] = of_tenant + size

    def give_back(self, tenant: str, size: int) -> None:
        """Count bytes no longer."""
        self._held[tenant] -= size
        if not self._held[tenant]:
            del self._held[tenant]


class _Files:
    """The files of one request, and their bytes in memory."""

    def __init__(self, fetcher: MediaFetcher, tenant: str) -> None:
        self.by_url: dict[str, bytes] = {}
        self._fetcher, self._tenant = fetcher, tenant
        self._counted = self._num_bytes = 0

    def take(self, size: int) -> None:
        """Count memory. Errors: HttpError 503."""
        self._fetcher.take(self._tenant, size)
        self._counted += size

    def add(self, size: int, url: str) -> None:
        """Count bytes that have arrived. Errors: InvalidRequestError, HttpError 503."""
        self._num_bytes += size
        if self._num_bytes > MOST_BYTES:
            raise _too_large(url)
        if (more := self._num_bytes - self._counted) > 0:
            self.take(more)

    def close(self) -> None:
        """Give the memory back."""
        self.by_url = {}
        if self._counted:
            self._fetcher.give_back(self._tenant, self._counted)


class _CheckedBackend(httpcore2.AnyIOBackend):
    """Opens connections to addresses that are allowed, and to no others."""

    def __init__(self, domains: AllowedDomains, resolve: Resolve) -> None:
        self._domains, self._resolve = domains, resolve

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """See httpcore2. Errors: also InvalidRequestError."""
        found = [host] if address_of(host) is not None else await self._resolve(host, port)
        addresses = [one for text in found if (one := address_of(text)) is not None]
        allowed = [str(one) for one in addresses if self._domains.allows(one)]
        if not allowed:
            raise InvalidRequestError(
                f"images are not fetched from {host!r:.80}: it has no public address, and a private one must itself "
                "be in the server's --allowed-media-domains"
            )
        for address in allowed[: _MOST_TRIED - 1]:
            if address != allowed[-1]:
                with contextlib.suppress(httpcore2.ConnectError, httpcore2.ConnectTimeout):
                    return await super().connect_tcp(address, port, timeout, local_address, socket_options)
        last = allowed[:_MOST_TRIED][-1]
        return await super().connect_tcp(last, port, timeout, local_address, socket_options)


class _Resolver:
    """Looks names up on threads of its own: a slow name server holds up no other work, nor the process's end."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(_LOOK_UPS)

    async def addresses(self, host: str, port: int) -> Sequence[str]:
        """Return the addresses of a name. Errors: InvalidRequestError."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Sequence[str] | None] = loop.create_future()

        def settle(addresses: Sequence[str] | None) -> None:
            self._slots.release()
            if not found.done():
                found.set_result(addresses)

        def look_up() -> None:
            addresses = None
            with contextlib.suppress(OSError, UnicodeError):
                addresses = [str(one[4][0]) for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                loop.call_soon_threadsafe(settle, addresses)

        await self._slots.acquire()
        threading.Thread(target=look_up, name="resolve", daemon=True).start()
        if (addresses := await found) is None:
            raise InvalidRequestError(f"the host {host!r:.80} is not known")
        return addresses


async def _read(answer: httpcore2.Response, url: str, files: _Files) -> bytes:
    """Return the body of an answer. Errors: InvalidRequestError, HttpError 503."""
    if answer.status != 200:
        raise InvalidRequestError(f"the image {url!r:.200} cannot be fetched: its server answers {answer.status}")
    if (coding := _header(answer, b"content-encoding")) not in ("", "identity"):
        raise InvalidRequestError(f"the image {url!r:.200} cannot be fetched: it is sent with coding {coding!r:.40}")
    announced = _header(answer, b"content-length")[:20]
    if announced.isdecimal() and int(announced) > MOST_BYTES:
        raise _too_large(url)
    parts: list[bytes] = []
    async for part in answer.aiter_stream():
        parts.append(part)
        files.add(len(part), url)
    return b"".join(parts)


def _too_large(url: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the image {url!r:.200} is too large: the images that are fetched for a request have at most {MOST_BYTES} "
        "bytes together"
    )


def _header(answer: httpcore2.Response, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in answer.headers if key.lower() == name), "")


def _target_of(url: str) -> _Target:
    """Return where a URL leads. Errors: InvalidRequestError."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").removesuffix("."), parts.port
    except ValueError as error:
        raise InvalidRequestError(f"the image's URL {url!r:.200} cannot be read: {error}") from None
    if len(url) > _MOST_URL_CHARS or parts.scheme not in _PORTS or not host or "@" in parts.netloc:
        raise InvalidRequestError(
            f"an image's URL must be http:// or https:// with a host, without a user, and at most {_MOST_URL_CHARS} "
            f"characters long; got {url!r:.200}"
        )
    path = quote(f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}", safe=_SAFE)
    return _Target(parts.scheme, host, port or _PORTS[parts.scheme], path)
