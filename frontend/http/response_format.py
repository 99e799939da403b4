"""The form of an answer required by a body: response_format, structured_outputs, Ollama's format."""

from typing import Any

from frontend.http.errors import HttpError
from frontend.text.response_format import constraint_of_response_format
from ipc.params.structured_outputs import StructuredOutputsParams


def read_structure(response_format: Any, structured_outputs: Any) -> StructuredOutputsParams | None:
    """Return the required structure of the output; None = any text. Errors: HttpError 400, InvalidRequestError."""
    if response_format is not None and not isinstance(response_format, dict):
        raise HttpError(400, 'response_format must be an object with a "type"', param="response_format")
    structure = constraint_of_response_format(response_format)
    if structured_outputs is None or structured_outputs == {}:
        return structure
    if structure is not None:
        raise HttpError(400, "response_format and structured_outputs cannot be combined", param="response_format")
    if not isinstance(structured_outputs, dict):
        raise HttpError(400, "structured_outputs must be an object", param="structured_outputs")
    known = StructuredOutputsParams.__struct_fields__
    if unknown := [name for name in structured_outputs if name not in known]:
        raise HttpError(
            400, f"structured_outputs has no {unknown[0]!r:.40}; known: {', '.join(known)}", param=unknown[0]
        )
    return StructuredOutputsParams(**structured_outputs)
