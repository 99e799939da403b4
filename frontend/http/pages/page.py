"""/ and /page/{name}: a chat page for a browser, of files without a framework; it contacts only this server."""

from pathlib import Path

from frontend.http.errors import HttpError
from frontend.http.request import Request, Response
from frontend.http.service import Service

_FOLDER = Path(__file__).with_name("web")
_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".mjs": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
#: The page's files by name. The licences of marked and DOMPurify are next to them.
_FILES = {path.name: path.read_bytes() for path in sorted(_FOLDER.iterdir()) if path.suffix in _TYPES}
#: Only the page's files are scripts and styles, only DOMPurify makes markup of a text, images are those of messages,
#: and only this server is contacted. No other page may frame it.
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    b"require-trusted-types-for 'script'; trusted-types dompurify"
)
_HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),  # the files of one version go together
)


async def get_page(service: Service, request: Request) -> Response:
    """Return the chat page, which contains no data: it asks for the key if one is needed."""
    return _file("index.html")


async def get_file(service: Service, request: Request) -> Response:
    """Return one of the chat page's files. Errors: HttpError 404."""
    if request.target not in _FILES:
        raise HttpError(404, f"the page has no file {request.target!r:.80}")
    return _file(request.target)


def _file(name: str) -> Response:
    return Response(_FILES[name], content_type=_TYPES[Path(name).suffix], headers=_HEADERS)
