"""Served: what an App and an HttpServer ask of that which they serve: one model (Service), or many (ManyModels)."""

from collections.abc import Sequence
from typing import Protocol

from frontend.http.request import Request
from frontend.http.service import Service
from frontend.http.shared import Shared


class Accepting(Protocol):
    """Whether a server accepts requests."""

    def refuse_requests(self) -> None:
        """Do nothing while new requests are accepted. Errors: HttpError 503."""


class Served(Protocol):
    """See the module's docstring. description: of the routes, as JSON; set by the App."""

    shared: Shared
    description: bytes

    @property
    def standing(self) -> Accepting:
        """Return whether the server accepts requests."""

    @property
    def services(self) -> Sequence[Service]:
        """Return the services of all models that are loaded."""

    async def service_for(self, request: Request) -> Service:
        """Return the service of the model that a request names. It may wait. Errors: HttpError."""

    def close(self) -> None:
        """Stop background work."""
