"""SamplingParams: one request's options for the sampler and the detokenizer. Names and defaults are vLLM's."""

import copy
import operator
from enum import IntEnum
from typing import Annotated, Any, NamedTuple

import msgspec

from ipc.errors import InvalidRequestError, UnsupportedParameterError
from ipc.params import list_parameters as lists
from ipc.params.beam_search import check_beam_search
from ipc.params.parameter import NumberChecks, Parameter, declared_parameters, integer
from ipc.params.structured_outputs import StructuredOutputsParams

MAX_CHOICES = 128
#: Temperatures in (0, MIN_TEMPERATURE) are raised to it, as in vLLM: 1/temperature must stay finite in float32.
MIN_TEMPERATURE = 0.01
_INT32 = 2**31 - 1


class RequestOutputKind(IntEnum):
    """Content of each RequestOutput of a request."""

    CUMULATIVE = 0  # all text and tokens so far
    DELTA = 1  # new text and tokens since the last output
    FINAL_ONLY = 2  # one output, when the request has finished


#: Types for a decoder. It checks a list's length before it makes the list, so a long one costs nothing.
#: Tokens that a client already has, for each choice, int32; their number is checked before they are decoded.
Delivered = Annotated[list[bytes], msgspec.Meta(max_length=MAX_CHOICES)]


class SamplingParams(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True):
    """Parameters of one request, validated when they are constructed and when they are decoded.

    New fields are appended and none is removed, for the wire format. Errors: InvalidRequestError (a ValueError) that
    names the parameter, its value and what is allowed; UnsupportedParameterError for parameters of vLLM that this
    version does not support.
    """

    n: Annotated[int, Parameter("number of answers to a prompt, which is computed once", 1, MAX_CHOICES)] = 1
    presence_penalty: Annotated[float, Parameter("subtracted from the logits of tokens in the output", -2, 2)] = 0.0
    frequency_penalty: Annotated[
        float, Parameter("subtracted from a token's logit for each time that it is in the output", -2, 2)
    ] = 0.0
    # vLLM: above 0; beyond these bounds logits would leave float32.
    repetition_penalty: Annotated[
        float,
        Parameter(
            "divides the logits of tokens in prompt or output if above 0, and multiplies them if below; 1 = off",
            1e-4,
            1e4,
            names=("repeat_penalty",),
            gguf="penalty_repeat",
        ),
    ] = 1.0
    temperature: Annotated[
        float, Parameter("divides the logits before a draw; 0 = greedy", 0, 1e4, is_of_draws=True, gguf="temp")
    ] = 1.0
    top_p: Annotated[
        float,
        Parameter(
            "draw from the smallest set of most likely tokens with this total probability, above 0; 1 = off",
            0,
            1,
            is_of_draws=True,
            gguf="top_p",
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        Parameter(
            "draw from this many of the most likely tokens; 0 or -1 = all", -1, _INT32, is_of_draws=True, gguf="top_k"
        ),
    ] = 0
    min_p: Annotated[
        float,
        Parameter(
            "draw from tokens with at least this share of the most likely token's probability; 0 = off",
            0,
            1,
            is_of_draws=True,
            gguf="min_p",
        ),
    ] = 0.0
    seed: Annotated[
        int | None, Parameter("the same seed gives the same answers; none or -1 = random", -(2**63), 2**64 - 1)
    ] = None
    stop: str | lists.StopStrings | None = None
    stop_token_ids: lists.StopTokenIds | None = None
    ignore_eos: bool = False
    max_tokens: Annotated[
        int | None,
        Parameter(
            "most tokens of an answer; none = up to max_model_len", 1, _INT32, names=("num_predict", "n_predict")
        ),
    ] = 16
    min_tokens: Annotated[int, Parameter("least tokens of an answer", 0, _INT32)] = 0
    # Most likely tokens to report with each output token, up to max_logprobs; -1 = all, True = 1, False = None.
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same for each prompt token
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: lists.LogitBias | None = None
    allowed_token_ids: lists.AllowedTokenIds | None = None
    bad_words: lists.BadWords | None = None
    structured_outputs: StructuredOutputsParams | None = None
    extra_args: None = None
    truncate_prompt_tokens: int | None = None  # keep this many tokens at the prompt's end; -1 = the model's limit
    flat_logprobs: bool = False
    bad_words_token_ids: lists.BadWordsTokenIds | None = None  # bad_words in token ids, written by the frontend
    # Parameters of vLLM that this version does not support; they are refused by name.
    prompt_logprob_token_ids: None = None
    prompt_logprob_start: None = None
    logprob_token_ids: None = None
    stream_interval: None = None
    skip_reading_prefix_cache: None = None
    thinking_token_budget: None = None
    repetition_detection: None = None
    routed_experts_prompt_start: None = None
    trace_decode_token_ids: None = None
    # Such parameters of earlier versions of vLLM.
    best_of: int | None = None  # beams of a beam search; None = n
    logits_processors: None = None
    guided_decoding: None = None
    use_beam_search: bool = False  # the n best of best_of beams; see ipc/params/beam_search.py
    length_penalty: float = 1.0
    early_stopping: bool | str = False  # or "never"
    skip_clone: bool = False
    # Options of llama.cpp.
    top_n_sigma: Annotated[
        float,
        Parameter(
            "keep tokens whose logit is at most this many standard deviations below the largest; 0 or less = off",
            -1,
            1e4,
            is_of_draws=True,
        ),
    ] = 0.0
    xtc_probability: Annotated[
        float,
        Parameter(
            "probability of excluding all tokens above xtc_threshold except the least likely of them; 0 = never",
            0,
            1,
            is_of_draws=True,
            gguf="xtc_probability",
        ),
    ] = 0.0
    xtc_threshold: Annotated[
        float,
        Parameter(
            "least probability of a token that xtc_probability applies to; above 0.5 = none",
            0,
            1,
            is_of_draws=True,
            gguf="xtc_threshold",
        ),
    ] = 0.1
    typical_p: Annotated[
        float,
        Parameter(
            "draw from the fewest typical tokens that have more than this probability together; 1 = off",
            0,
            1,
            is_of_draws=True,
        ),
    ] = 1.0
    repeat_last_n: Annotated[
        int,
        Parameter(
            "the penalties look at this many last tokens of prompt and output; 0 = at none, -1 = at the whole text, "
            "where presence and frequency count the output only",
            -1,
            8192,
            names=("penalty_last_n",),
        ),
    ] = -1

    def __post_init__(self) -> None:
        refuse_parameters(self)
        if self.truncate_prompt_tokens is not None:
            self.truncate_prompt_tokens = _truncation(self.truncate_prompt_tokens)
        if isinstance(self.min_tokens, int) and self.min_tokens < 0:
            bounds = f"min_tokens must be in {NUMBERS['min_tokens'].bounds}, got {self.min_tokens}"
            raise InvalidRequestError(f"{bounds}: min_tokens must be greater than or equal to 0")
        _check_numbers(self)
        self._normalize_numbers()
        check_beam_search(self)
        if self.use_beam_search:
            self._refuse_draws()
        elif self.temperature == 0.0 and self.n > 1:
            raise InvalidRequestError(f"n must be 1 for greedy decoding, which has one answer; got n={self.n}")
        self._check_switches()
        self.stop = lists.check_stop_strings(self.stop)
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop strings need text: use detokenize=True, or stop_token_ids")
        self.stop_token_ids = lists.check_stop_token_ids(self.stop_token_ids)
        self.logprobs = _num_logprobs("logprobs", self.logprobs)
        self.prompt_logprobs = _num_logprobs("prompt_logprobs", self.prompt_logprobs)
        self.logit_bias = lists.check_logit_bias(self.logit_bias)
        self.allowed_token_ids = lists.check_allowed_token_ids(self.allowed_token_ids)
        self.bad_words = lists.check_bad_words(self.bad_words)
        self.bad_words_token_ids = lists.check_bad_words_token_ids(self.bad_words_token_ids)
        self.check_structured_outputs()
        if type(self.output_kind) is not RequestOutputKind:
            self.output_kind = _output_kind(self.output_kind)

    def _normalize_numbers(self) -> None:
        """Normalize values with the same meaning, and check pairs of numbers and special cases."""
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE
        if self.top_p == 0.0:
            raise InvalidRequestError("top_p must be in (0, 1], got 0.0; for greedy decoding set temperature=0")
        self.top_k = max(0, self.top_k)
        self.top_n_sigma = max(0.0, self.top_n_sigma)
        if self.seed is not None:
            self.seed = None if self.seed == -1 else self.seed & (2**64 - 1)  # -1 = "no seed", as in vLLM
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens must not exceed max_tokens, got min_tokens={self.min_tokens} max_tokens={self.max_tokens}"
            )

    def _refuse_draws(self) -> None:
        for name in OF_DRAWS:
            value = getattr(self, name)
            if name != "temperature" and value != NUMBERS[name].default:  # a search's scores are divided by it
                raise InvalidRequestError(
                    f"{name}={value!r} and use_beam_search cannot be combined: a beam search draws nothing"
                )

    def _check_switches(self) -> None:
        for name, value in zip(_SWITCHES, _read_switches(self), strict=True):
            if type(value) is not bool:
                raise InvalidRequestError(f"{name} must be True or False, got {value!r}")
        self.spaces_between_special_tokens = True  # nothing stands between them in any case, as in vLLM today

    def check_structured_outputs(self) -> None:
        """Check the structured output, also against the other parameters. Errors: InvalidRequestError."""
        given = self.structured_outputs
        if given is not None and not isinstance(given, StructuredOutputsParams):
            raise InvalidRequestError(f"structured_outputs must be StructuredOutputsParams, got {given!r:.80}")
        if given is not None and self.ignore_eos:
            raise InvalidRequestError("ignore_eos and structured_outputs contradict each other: EOS ends the grammar")

    @staticmethod
    def from_optional(**options: Any) -> "SamplingParams":
        """Return parameters from the options that are not None, such as those that a web server reads from a body.

        The others get their defaults, except that max_tokens=None means "up to max_model_len", as in vLLM.
        """
        given = {name: value for name, value in options.items() if value is not None or name == "max_tokens"}
        return SamplingParams(**given)

    def changed(self, **fields: Any) -> "SamplingParams":
        """Return a copy with other values of these fields. Nothing is checked: the values must be checked ones."""
        other = copy.copy(self)
        for name, value in fields.items():
            setattr(other, name, value)
        return other

    def clone(self) -> "SamplingParams":
        """Return a copy that shares no list or dict with this one."""
        return copy.deepcopy(self)

    @property
    def reports_logprobs(self) -> bool:
        """Return whether log probabilities come with the answer."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def stop_strings(self) -> list[str]:
        """Return `stop` as a list, empty if there is none."""
        return self.stop if isinstance(self.stop, list) else []


_SWITCHES = (
    "ignore_eos",
    "detokenize",
    "spaces_between_special_tokens",
    "skip_special_tokens",
    "include_stop_str_in_output",
)
_read_switches = operator.attrgetter(*_SWITCHES)
#: Every number of SamplingParams by name.
NUMBERS = declared_parameters(SamplingParams)
_check_numbers = NumberChecks(NUMBERS)
#: The numbers that control how a token is drawn. A beam search draws none, and takes no defaults of these.
OF_DRAWS = tuple(name for name, one in NUMBERS.items() if one.parameter.is_of_draws)


def check_num_logprobs(params: SamplingParams, *, vocab_size: int, max_logprobs: int) -> None:
    """Check the number of log probabilities that a request asks for at each position.

    max_logprobs: the engine's option, -1 = any number. Errors: InvalidRequestError.
    """
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        asked = vocab_size if count == -1 else count or 0
        if max_logprobs != -1 and asked > max_logprobs:
            raise InvalidRequestError(
                f"{name}={count} asks for {asked} tokens at each position, but this engine reports at most "
                f"{max_logprobs}: ask for fewer, or start the engine with a larger max_logprobs (-1: any number)"
            )


def _output_kind(value: int) -> RequestOutputKind:
    try:
        return RequestOutputKind(value)
    except ValueError:
        kinds = [kind.name for kind in RequestOutputKind]
        raise InvalidRequestError(f"output_kind must be one of {kinds}, got {value!r}") from None


def _truncation(value: object) -> int:
    count = integer("truncate_prompt_tokens", value, -1, _INT32)
    if count == 0:
        raise InvalidRequestError(
            "truncate_prompt_tokens must be at least 1, or -1 for as many as the model takes, got 0"
        )
    return count


def _num_logprobs(name: str, value: object) -> int | None:
    if value is None or value is False:
        return None
    return 1 if value is True else integer(name, value, -1, _INT32)


# Sampling parameters of vLLM, including earlier versions, that this version does not support. They are refused by name.


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
