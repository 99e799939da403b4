"""/: a chat page for a browser, one file without a framework; it contacts only this server."""

from pathlib import Path

from frontend.http.request import Request, Response
from frontend.http.service import Service

_PAGE = Path(__file__).with_name("page.html").read_bytes()
#: The page runs only its own script and style, and contacts only this server. No other page may frame it.
_POLICY = (
    b"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


async def get_page(service: Service, request: Request) -> Response:
    """Return the chat page, which contains no data: it asks for the key if one is needed."""
    headers = [
        (b"content-security-policy", _POLICY),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
    ]
    return Response(_PAGE, content_type=b"text/html; charset=utf-8", headers=headers)
