"""Route: one row of the routing table (frontend/http/routes.py)."""

from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from frontend.http.errors import HttpError

#: Called with the Service and the Request; returns a Response or a Reply. routes.py checks its rows with these types.
Handler = Callable[[Any, Any], Awaitable[Any]]


class Access(Enum):
    """Who may use a route."""

    OPEN = "open"  # any caller, without a key
    KEY = "key"  # callers with a key, if the server has keys


class Route(NamedTuple):
    """One row. For a path that ends in "/", the rest of the request's path is its target; for one with {name}, maybe
    also {item}, what is there, with a "/" between. access: KEY by default.

    error_body: the form of errors, if it is not OpenAI's. is_of_server: the handler is called with the Served
    instead of a Service, because it needs no model. is_upload: it reads the body itself, part by part.
    """

    method: str
    path: str
    handler: Handler
    access: Access = Access.KEY
    body: type[msgspec.Struct] | None = None
    error_body: Callable[[HttpError], bytes] = HttpError.body
    is_of_server: bool = False
    is_upload: bool = False
