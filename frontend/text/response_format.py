"""The constraint that OpenAI's field response_format asks for."""

import json
from collections.abc import Mapping
from typing import Any

from ipc.errors import InvalidRequestError
from ipc.structured_outputs import StructuredOutputsParams


def constraint_of_response_format(response_format: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    """Return the constraint of an OpenAI response_format; None for text. Errors: InvalidRequestError."""
    kind = None if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=json.dumps(dict(response_format), ensure_ascii=False))
    if kind != "json_schema":
        raise InvalidRequestError(
            f"response_format has type text, json_object, json_schema or structural_tag, got {kind!r:.80}"
        )
    described = response_format.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, dict):
        raise InvalidRequestError("response_format of type json_schema needs json_schema.schema, a JSON object")
    return StructuredOutputsParams(json=schema)
