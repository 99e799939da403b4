"""/health, /live, /ready and /ping. None of them asks the engine or waits."""

from frontend.http.request import Request, Response
from frontend.http.service import Service


async def get_live(service: Service, request: Request) -> Response:
    """Answer while the server's loop turns."""
    return Response(b"", content_type=b"text/plain")


async def get_health(service: Service, request: Request) -> Response:
    """Answer while new requests are accepted (frontend/http/service.py)."""
    service.standing.refuse_probe()
    return Response(b"", content_type=b"text/plain")
