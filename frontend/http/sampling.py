"""Sampling parameters of a body: the body's fields, then the model's own defaults, then OpenAI's.

A beam search draws nothing, so the model's defaults for draws do not apply to it.
"""

import operator
from itertools import compress, repeat
from typing import Any

from frontend.http.bodies import ParameterFields, SamplingFields, refuse_fields
from frontend.http.errors import HttpError
from frontend.text.response_format import constraint_of_response_format
from ipc.params.sampling_params import NUMBERS, OF_DRAWS, RequestOutputKind, SamplingParams
from ipc.params.structured_outputs import StructuredOutputsParams

#: Field of a body -> parameter: first the names of other engines, so that ours override them.
_PARAMETERS = {
    **{name: one.name for one in NUMBERS.values() for name in one.parameter.names},
    **{name: name for name in ParameterFields.__struct_fields__ if name in SamplingParams.__struct_fields__},
}
_read_parameters = operator.attrgetter(*_PARAMETERS)


def read_sampling(
    body: SamplingFields, defaults: dict[str, Any], *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Return the parameters of one request.

    defaults: those that the model recommends. max_tokens: the dialect's own default, None = the rest of the context.
    logprobs: most likely tokens to report for each. Errors: HttpError, InvalidRequestError.
    """
    refuse_fields(body)
    if body.stream_options is not None and not body.stream:
        raise HttpError(400, "stream_options needs stream: true", param="stream_options")
    values = _read_parameters(body)
    is_given = map(operator.is_not, values, repeat(None))  # few are
    given = dict(compress(zip(_PARAMETERS.values(), values, strict=True), is_given))
    if body.use_beam_search:
        defaults = {name: value for name, value in defaults.items() if name not in OF_DRAWS} | {"temperature": 0.0}
    limit = given.get("max_tokens", defaults.get("max_tokens", max_tokens))
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    structure = read_structure(body.response_format, body.structured_outputs)
    own = {"max_tokens": limit, "logprobs": logprobs, "output_kind": kind, "structured_outputs": structure}
    return SamplingParams(**{**defaults, **given, **own})


# The form of an answer required by a body: response_format, structured_outputs, Ollama's format.


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
