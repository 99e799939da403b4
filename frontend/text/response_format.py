"""The constraint of OpenAI's field response_format."""

import json
from collections.abc import Mapping
from typing import Any

from ipc.errors import InvalidRequestError
from ipc.params.structured_outputs import StructuredOutputsParams


def constraint_of_response_format(response_format: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    """Return the constraint of an OpenAI response_format; None for text. Errors: InvalidRequestError.

    The schema may also be next to the type, even for json_object, as clients of llama.cpp and others send it. Then its
    objects have no further properties, as in llama.cpp.
    """
    kind = None if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    beside = response_format.get("schema")
    if kind == "json_object" and beside is None:
        return StructuredOutputsParams(json_object=True)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=json.dumps(dict(response_format), ensure_ascii=False))
    if kind not in ("json_schema", "json_object"):
        raise InvalidRequestError(
            f"response_format must have type text, json_object, json_schema or structural_tag, got {kind!r:.80}"
        )
    described = response_format.get("json_schema")
    schema = described.get("schema") if kind == "json_schema" and isinstance(described, Mapping) else beside
    if not isinstance(schema, dict):
        where = "json_schema.schema" if kind == "json_schema" else "its schema"
        raise InvalidRequestError(f"response_format of type {kind} needs {where}, a JSON object")
    return StructuredOutputsParams(json=schema, disable_additional_properties=kind == "json_object")
