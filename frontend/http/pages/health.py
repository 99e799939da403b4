"""/health, /live, /ready and /ping. None of them asks the engine anything, and none waits."""

from frontend.http.errors import HttpError
from frontend.http.request import Request, Response
from frontend.http.service import Service


async def get_live(service: Service, request: Request) -> Response:
    """Answer while the server's loop turns."""
    return Response(b"", content_type=b"text/plain")


async def get_ready(service: Service, request: Request) -> Response:
    """Answer while new requests are taken: not during a shutdown, and not without an engine."""
    if service.is_draining:
        raise HttpError(503, "the server is shutting down")
    return await get_health(service, request)


async def get_health(service: Service, request: Request) -> Response:
    """Answer while the engine lives and shows it, or is being started again."""
    if service.engine.client.error is not None:
        raise HttpError(503, "the engine is not running")
    if text := service.describe_hang():
        raise HttpError(503, f"the engine hangs: {text}")
    return Response(b"", content_type=b"text/plain")
