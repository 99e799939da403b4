"""/openapi.json: the description of all routes, generated from the routing table and the bodies' types."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from frontend.http.errors import HttpError
from frontend.http.request import Request, Response
from frontend.http.service import Service
from ipc.version import VERSION

_ERROR = {
    "description": "an error",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}
_TEXT_ERROR = {
    "description": "an error",
    "content": {"application/json": {"schema": {"type": "object", "properties": {"error": {"type": "string"}}}}},
}
_ERROR_SCHEMA = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}


async def get_description(service: Service, request: Request) -> Response:
    """Return this description."""
    return Response(service.description)


def _error_of(route: Any) -> dict[str, Any]:
    """Return the schema of an error in the route's API: Ollama's is a text."""
    is_text = isinstance(msgspec.json.decode(route.error_body(HttpError(400, "wrong")))["error"], str)
    return _TEXT_ERROR if is_text else _ERROR


def describe(routes: Sequence[Any], root_path: str = "") -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of these routes (frontend/http/routes.py). root_path: their path at a proxy."""
    bodies = [route.body for route in routes if route.body is not None]
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        ends_in_target = route.path.endswith("/") and len(route.path) > 1
        path = f"{route.path}{{name}}" if ends_in_target else route.path
        targets = re.findall(r"{([a-z]+)}", path)
        operation: dict[str, Any] = {
            "summary": (route.handler.__doc__ or "").splitlines()[0],
            "responses": {"200": {"description": "the answer"}, "default": _error_of(route)},
            "security": [{"key": []}] if route.access.value == "key" else [],
        }
        if targets:
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in targets
            ]
        if route.body is not None:
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": schema_of[route.body]}},
            }
        paths.setdefault(path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "engine-core", "version": VERSION},
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR_SCHEMA},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
