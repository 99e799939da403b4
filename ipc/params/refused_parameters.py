"""Sampling parameters of vLLM, including earlier versions, that this version does not support. They are refused by
name.
"""

import operator
from typing import Any, NamedTuple

from ipc.errors import UnsupportedParameterError


class _Refused(NamedTuple):
    default: float | bool | None  # the value without effect that the wire's type allows
    instead: str = ""  # what to do
    also: float | None = None  # another value without effect


_LOGITS = "logits stay in the engine: use logit_bias, allowed_token_ids or bad_words"

#: Every field of SamplingParams that may only have its default.
REFUSED = {
    "extra_args": _Refused(None),
    "flat_logprobs": _Refused(False),
    "prompt_logprob_token_ids": _Refused(None),
    "prompt_logprob_start": _Refused(None),
    "logprob_token_ids": _Refused(None),
    "stream_interval": _Refused(None),
    "skip_reading_prefix_cache": _Refused(None),
    "thinking_token_budget": _Refused(None),
    "repetition_detection": _Refused(None),
    "routed_experts_prompt_start": _Refused(None, also=0),
    "trace_decode_token_ids": _Refused(None),
    "logits_processors": _Refused(None, _LOGITS),
    "guided_decoding": _Refused(None, "use structured_outputs=StructuredOutputsParams(...)"),
    "skip_clone": _Refused(False, "parameters are copied for every request, so the caller may change its own"),
}


_read_refused = operator.attrgetter(*REFUSED)
_DEFAULTS = tuple(one.default for one in REFUSED.values())


def refuse_parameters(params: Any) -> None:
    """Raise UnsupportedParameterError that names the first parameter not at its default, and what to do instead."""
    if all(map(operator.is_, _read_refused(params), _DEFAULTS)):  # the usual case; this costs a tenth of the loop
        return
    for name, (default, instead, also) in REFUSED.items():
        value = getattr(params, name)
        if value is default:
            continue
        if also is not None and _is_same(value, also):
            value = default
        is_empty = default is None and isinstance(value, (list, dict)) and not value
        if not is_empty and not _is_same(value, default):
            raise UnsupportedParameterError(
                f"{name}={value!r} is not supported by this version; leave it at its default ({default!r})"
                + (f": {instead}" if instead else "")
            )
        setattr(params, name, default)  # the value that the wire's type allows: 1.0, not 1; null, not []


def _is_same(value: object, default: object) -> bool:
    if value is None or default is None or isinstance(value, bool) or isinstance(default, bool):
        return value is default
    return isinstance(value, (int, float)) and value == default
