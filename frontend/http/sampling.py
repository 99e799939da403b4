"""Sampling parameters of a body: the body's fields, then the model's own defaults, then OpenAI's.

A beam search draws nothing, so the model's defaults for draws are not for it.
"""

from typing import Any

from frontend.http.bodies import SamplingFields, refuse_fields
from frontend.http.response_format import read_structure
from ipc.params.sampling_params import RequestOutputKind, SamplingParams

#: Fields of a body with the names and meanings of SamplingParams.
_NAMES = SamplingFields.__struct_fields__[: SamplingFields.__struct_fields__.index("model")]
_OF_DRAWS = ("temperature", "top_p", "top_k", "min_p")


def read_sampling(
    body: SamplingFields, defaults: dict[str, Any], *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Return the parameters of one request.

    defaults: those that the model recommends. max_tokens: the dialect's own default, None = what is left of the
    context. logprobs: likely tokens to report beside each. Errors: HttpError, InvalidRequestError.
    """
    refuse_fields(body)
    given = {name: value for name in _NAMES if (value := getattr(body, name)) is not None}
    if body.use_beam_search:
        defaults = {name: value for name, value in defaults.items() if name not in _OF_DRAWS} | {"temperature": 0.0}
    limit = body.max_tokens if body.max_tokens is not None else defaults.get("max_tokens", max_tokens)
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    structure = read_structure(body.response_format, body.structured_outputs)
    own = {"max_tokens": limit, "logprobs": logprobs, "output_kind": kind, "structured_outputs": structure}
    return SamplingParams(**{**defaults, **given, **own})
