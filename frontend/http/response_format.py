"""The form that an answer must have, as a body asks for it: response_format, structured_outputs, Ollama's format."""

from typing import Any

from frontend.http.errors import HttpError
from ipc.structured_outputs import StructuredOutputsParams


def read_structure(response_format: Any, structured_outputs: Any) -> StructuredOutputsParams | None:
    """Return the structure that the output must have; None = any text. Errors: HttpError 400, InvalidRequestError."""
    structure = _of_format(response_format)
    if structured_outputs is None or structured_outputs == {}:
        return structure
    if structure is not None:
        raise HttpError(400, "response_format and structured_outputs exclude each other", param="response_format")
    if not isinstance(structured_outputs, dict):
        raise HttpError(400, "structured_outputs must be an object", param="structured_outputs")
    known = StructuredOutputsParams.__struct_fields__
    if unknown := [name for name in structured_outputs if name not in known]:
        raise HttpError(
            400, f"structured_outputs has no {unknown[0]!r:.40}; known: {', '.join(known)}", param=unknown[0]
        )
    return StructuredOutputsParams(**structured_outputs)


def schema_structure(schema: Any, name: str) -> StructuredOutputsParams:
    """Return the structure of a JSON schema. name: of the field, for errors."""
    if not isinstance(schema, dict):
        raise HttpError(400, f"{name} must be a JSON schema, an object", param="response_format")
    return StructuredOutputsParams(json=schema)


def _of_format(given: Any) -> StructuredOutputsParams | None:
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "json_schema":
        described = given.get("json_schema")
        return schema_structure(described.get("schema") if isinstance(described, dict) else None, "json_schema.schema")
    raise HttpError(
        400, 'response_format must have the type "text", "json_object" or "json_schema"', param="response_format"
    )
