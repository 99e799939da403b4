"""SamplingParams: one request's options for the sampler and the detokenizer. Names and defaults are vLLM's."""

import copy
import numbers
from collections.abc import Collection
from enum import IntEnum
from typing import Annotated, Any

import msgspec
import numpy as np

from ipc.errors import InvalidRequestError
from ipc.params.beam_search import check_beam_search
from ipc.params.refused_parameters import refuse_parameters
from ipc.params.structured_outputs import StructuredOutputsParams
from ipc.tables.arrays import Ints

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_BAD_WORD_TOKENS = 64
#: Most entries of allowed_token_ids: the largest vocabularies have 262,208 tokens.
MAX_ALLOWED_TOKENS = 300_000
#: Most entries of logit_bias.
MAX_LOGIT_BIASES = 65_536
#: Logit biases are clamped to [-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS], as in vLLM.
MAX_LOGIT_BIAS = 100.0
#: Temperatures in (0, MIN_TEMPERATURE) are raised to it, as in vLLM: 1/temperature must stay finite in float32.
MIN_TEMPERATURE = 0.01


class RequestOutputKind(IntEnum):
    """Content of each RequestOutput of a request."""

    CUMULATIVE = 0  # all text and tokens so far
    DELTA = 1  # what is new since the last one
    FINAL_ONLY = 2  # one output, when the request has finished


#: What a decoder takes. It looks at a list's length before it makes the list, so a long one costs nothing.
#: Tokens that a client has already, of each choice, int32; their number is checked before they are made.
Delivered = Annotated[list[bytes], msgspec.Meta(max_length=MAX_CHOICES)]
_StopStrings = Annotated[list[str], msgspec.Meta(max_length=MAX_STOP_STRINGS)]
_StopTokenIds = Annotated[list[int], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)]
_LogitBias = Annotated[dict[int, float], msgspec.Meta(max_length=MAX_LOGIT_BIASES)]
_AllowedTokenIds = Annotated[list[int], msgspec.Meta(max_length=MAX_ALLOWED_TOKENS)]
_BadWords = Annotated[list[str], msgspec.Meta(max_length=MAX_BAD_WORDS)]
_BadWord = Annotated[list[int], msgspec.Meta(max_length=MAX_BAD_WORD_TOKENS)]
_BadWordsTokenIds = Annotated[list[_BadWord], msgspec.Meta(max_length=2 * MAX_BAD_WORDS)]


class SamplingParams(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True):
    """Parameters of one request, validated when they are constructed and again when they are decoded.

    New fields are appended and none is removed, for the wire format. Errors: InvalidRequestError (a ValueError) that
    names the parameter, its value and what is allowed; UnsupportedParameterError for parameters of vLLM that this
    version does not support.
    """

    n: int = 1  # choices
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 = all
    min_p: float = 0.0
    seed: int | None = None
    stop: str | _StopStrings | None = None
    stop_token_ids: _StopTokenIds | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None = up to max_model_len
    min_tokens: int = 0
    # Most likely tokens to report beside each output token, up to max_logprobs; -1 = all, True = 1, False = None.
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same beside each prompt token
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: _LogitBias | None = None
    allowed_token_ids: _AllowedTokenIds | None = None
    bad_words: _BadWords | None = None
    structured_outputs: StructuredOutputsParams | None = None
    extra_args: None = None
    truncate_prompt_tokens: int | None = None  # keep this many tokens at the prompt's end; -1 = what the model takes
    flat_logprobs: bool = False
    bad_words_token_ids: _BadWordsTokenIds | None = None  # bad_words in token ids, written by the frontend
    # Parameters of vLLM that this version does not support, and refuses by name.
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

    def __post_init__(self) -> None:
        refuse_parameters(self)
        if self.truncate_prompt_tokens is not None:
            self.truncate_prompt_tokens = _truncation(self.truncate_prompt_tokens)
        self.n = _integer("n", self.n, 1, MAX_CHOICES)
        for name, (low, high) in _PENALTIES.items():
            setattr(self, name, _number(name, getattr(self, name), low, high))
        self.temperature = _number("temperature", self.temperature, 0.0, 1e4)
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE
        check_beam_search(self)
        if self.temperature == 0.0 and self.n > 1 and not self.use_beam_search:
            raise InvalidRequestError(f"n must be 1 for greedy decoding, which has one answer; got n={self.n}")
        self.top_p = _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequestError("top_p must be in (0, 1], got 0.0; for greedy decoding set temperature=0")
        self.min_p = _number("min_p", self.min_p, 0.0, 1.0)
        self.top_k = max(0, _integer("top_k", self.top_k, -1, 2**31 - 1))
        if self.seed == -1:  # "no seed", as in vLLM
            self.seed = None
        if self.seed is not None:
            self.seed = _integer("seed", self.seed, -(2**63), 2**64 - 1) & (2**64 - 1)
        self._check_lengths()
        self._check_switches()
        self.stop = _stop_strings(self.stop)
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop strings need text: use detokenize=True, or stop_token_ids")
        self.stop_token_ids = _stop_token_ids(self.stop_token_ids)
        self.logprobs = _num_logprobs("logprobs", self.logprobs)
        self.prompt_logprobs = _num_logprobs("prompt_logprobs", self.prompt_logprobs)
        self.logit_bias = _logit_bias(self.logit_bias)
        self.allowed_token_ids = _allowed_token_ids(self.allowed_token_ids)
        self.bad_words = _bad_words(self.bad_words)
        self.bad_words_token_ids = _bad_words_token_ids(self.bad_words_token_ids)
        self._check_structured_outputs()
        try:
            self.output_kind = RequestOutputKind(self.output_kind)
        except ValueError:
            raise InvalidRequestError(
                f"output_kind must be one of {[kind.name for kind in RequestOutputKind]}, got {self.output_kind!r}"
            ) from None

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            self.max_tokens = _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        if isinstance(self.min_tokens, int) and self.min_tokens < 0:
            bounds = f"min_tokens must be in [0, {2**31 - 1}], got {self.min_tokens}"
            raise InvalidRequestError(f"{bounds}: min_tokens must be greater than or equal to 0")
        self.min_tokens = _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens must not exceed max_tokens, got min_tokens={self.min_tokens} max_tokens={self.max_tokens}"
            )

    def _check_switches(self) -> None:
        for name in (
            "ignore_eos",
            "detokenize",
            "spaces_between_special_tokens",
            "skip_special_tokens",
            "include_stop_str_in_output",
        ):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be True or False, got {getattr(self, name)!r}")
        self.spaces_between_special_tokens = True  # nothing stands between them in any case, as in vLLM today

    def _check_structured_outputs(self) -> None:
        given = self.structured_outputs
        if given is not None and not isinstance(given, StructuredOutputsParams):
            raise InvalidRequestError(f"structured_outputs must be StructuredOutputsParams, got {given!r:.80}")
        if given is not None and self.ignore_eos:
            raise InvalidRequestError("ignore_eos and structured_outputs contradict each other: EOS ends the grammar")

    @staticmethod
    def from_optional(**options: Any) -> "SamplingParams":
        """Return parameters of the options that are not None, such as a web server reads from a body.

        The others get their defaults, except that max_tokens=None means "up to max_model_len", as in vLLM.
        """
        given = {name: value for name, value in options.items() if value is not None or name == "max_tokens"}
        return SamplingParams(**given)

    def clone(self) -> "SamplingParams":
        """Return a copy that shares no list or dict with this one."""
        return copy.deepcopy(self)

    @property
    def reports_logprobs(self) -> bool:
        """Return whether log probabilities come with the answer."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list; empty when there is none."""
        return self.stop if isinstance(self.stop, list) else []


def check_num_logprobs(params: SamplingParams, *, vocab_size: int, max_logprobs: int) -> None:
    """Check the number of log probabilities that a request asks for at each position.

    max_logprobs: the engine's option, -1 = any number. Errors: InvalidRequestError.
    """
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        asked = vocab_size if count == -1 else count or 0
        if max_logprobs != -1 and asked > max_logprobs:
            raise InvalidRequestError(
                f"{name}={count} asks for {asked} tokens at each position and this engine reports at most "
                f"{max_logprobs}: ask for fewer, or start the engine with a larger max_logprobs (-1: any number)"
            )


_PENALTIES = {
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-4, 1e4),  # vLLM: above 0; beyond these bounds logits would leave float32
}


def _number(name: str, value: object, low: float, high: float) -> float:
    if type(value) is float and low <= value <= high:  # as a message's are; a first token waits for these checks
        return value
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        raise InvalidRequestError(f"{name} must be a number in [{low:g}, {high:g}], got {value!r}")
    plain = value if isinstance(value, (int, float)) else float(value)  # NumPy's scalars
    if not low <= plain <= high:  # also for NaN
        raise InvalidRequestError(f"{name} must be in [{low:g}, {high:g}], got {value!r}")
    return float(plain)


def _integer(name: str, value: object, low: int, high: int) -> int:
    if type(value) is int and low <= value <= high:
        return value
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, numbers.Integral)):
        raise InvalidRequestError(f"{name} must be an integer in [{low}, {high}], got {value!r}")
    plain = int(value)
    if not low <= plain <= high:
        raise InvalidRequestError(f"{name} must be in [{low}, {high}], got {value}")
    return plain


def _stop_strings(stop: object) -> list[str]:
    strings = [stop] if isinstance(stop, str) else list(stop) if isinstance(stop, (list, tuple)) else []
    if stop is not None and not isinstance(stop, (str, list, tuple)):
        raise InvalidRequestError(f"stop must be a string or a list of strings, got {stop!r}")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"at most {MAX_STOP_STRINGS} stop strings are allowed, got {len(strings)}")
    for string in strings:
        if not isinstance(string, str) or not 0 < len(string) <= MAX_STOP_STRING_CHARS:
            raise InvalidRequestError(f"stop strings have 1 to {MAX_STOP_STRING_CHARS} characters, got {string!r:.80}")
        if any("\ud800" <= char <= "\udfff" for char in string):
            raise InvalidRequestError(f"a stop string must be valid Unicode; {string!r:.80} has a lone surrogate")
    return strings


def _stop_token_ids(ids: object) -> list[int]:
    if ids is None:
        return []
    if not isinstance(ids, (list, tuple)) or len(ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(f"stop_token_ids must be a list of at most {MAX_STOP_TOKEN_IDS} token ids")
    return [_integer("stop_token_ids", token, 0, 2**31 - 1) for token in ids]


def _truncation(value: object) -> int:
    count = _integer("truncate_prompt_tokens", value, -1, 2**31 - 1)
    if count == 0:
        raise InvalidRequestError("truncate_prompt_tokens must be at least 1, or -1 for what the model takes, got 0")
    return count


def _num_logprobs(name: str, value: object) -> int | None:
    if value is None or value is False:
        return None
    return 1 if value is True else _integer(name, value, -1, 2**31 - 1)


def _logit_bias(bias: object) -> dict[int, float] | None:
    """Return a copy with every bias clamped. Whole columns are checked at once: there may be tens of thousands."""
    if bias is None or bias == {}:
        return None
    if not isinstance(bias, dict):
        raise InvalidRequestError(f"logit_bias must map token ids to numbers, got {bias!r:.80}")
    if len(bias) > MAX_LOGIT_BIASES:
        raise InvalidRequestError(f"logit_bias has at most {MAX_LOGIT_BIASES} entries, got {len(bias)}")
    if not {*map(type, bias)} <= {int} or not {*map(type, bias.values())} <= {int, float}:
        bias = _plain_bias(bias)
    keys = _token_ids("a token id in logit_bias", bias).tolist()
    try:
        values = np.fromiter(bias.values(), np.float64, len(bias))
    except OverflowError:  # an int beyond float64
        values = np.array([max(-MAX_LOGIT_BIAS, min(value, MAX_LOGIT_BIAS)) for value in bias.values()], np.float64)
    if np.isnan(values).any():
        raise InvalidRequestError(
            f"logit_bias of token {keys[int(np.isnan(values).argmax())]} must be a number, got nan"
        )
    return dict(zip(keys, values.clip(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS).tolist(), strict=True))


def _plain_bias(bias: dict[Any, Any]) -> dict[int, float]:
    """Return the same with Python's own ints and floats: keys of JSON are strings, and NumPy has scalars."""
    plain = {}
    for token, value in bias.items():
        key = int(token) if isinstance(token, str) and token.isdecimal() else token
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidRequestError(f"logit_bias of token {token!r:.80} must be a number, got {value!r:.80}")
        plain[_integer("a token id in logit_bias", key, 0, 2**31 - 1)] = value
    return plain


def _allowed_token_ids(ids: object) -> list[int] | None:
    """Return the ids sorted and without duplicates."""
    if ids is None:
        return None
    if not isinstance(ids, (list, tuple)) or not ids:
        raise InvalidRequestError(f"allowed_token_ids must be a list of at least one token id, got {ids!r:.80}")
    if len(ids) > MAX_ALLOWED_TOKENS:
        raise InvalidRequestError(f"allowed_token_ids has at most {MAX_ALLOWED_TOKENS} entries, got {len(ids)}")
    sorted_ids: list[int] = np.unique(_token_ids("allowed_token_ids", ids)).tolist()
    return sorted_ids


def _token_ids(name: str, ids: Collection[Any]) -> Ints:
    """Return these token ids as an array. Errors: InvalidRequestError for the first that is none."""
    if {*map(type, ids)} == {int}:
        try:
            column = np.fromiter(ids, np.int64, len(ids))
        except OverflowError:
            column = np.array([-1])
        if column.min() >= 0 and column.max() < 2**31:
            return column
    return np.array([_integer(name, token, 0, 2**31 - 1) for token in ids], np.int64)


def _bad_words(words: object) -> list[str] | None:
    if words is None or words == []:
        return None
    if not isinstance(words, (list, tuple)) or len(words) > MAX_BAD_WORDS:
        raise InvalidRequestError(f"bad_words must be a list of at most {MAX_BAD_WORDS} strings, got {words!r:.80}")
    for word in words:
        if not isinstance(word, str) or not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
            raise InvalidRequestError(
                f"a bad word has 1 to {MAX_BAD_WORD_CHARS} characters, not all of them spaces; got {word!r:.80}"
            )
        if any("\ud800" <= char <= "\udfff" for char in word):
            raise InvalidRequestError(f"a bad word must be valid Unicode; {word!r:.80} has a lone surrogate")
    return list(words)


def _bad_words_token_ids(sequences: object) -> list[list[int]] | None:
    if sequences is None or sequences == []:
        return None
    if not isinstance(sequences, (list, tuple)) or len(sequences) > 2 * MAX_BAD_WORDS:
        raise InvalidRequestError(
            f"bad_words_token_ids must be a list of at most {2 * MAX_BAD_WORDS} lists of token ids"
        )
    for ids in sequences:
        if not isinstance(ids, (list, tuple)) or not 0 < len(ids) <= MAX_BAD_WORD_TOKENS:
            raise InvalidRequestError(f"a bad word has 1 to {MAX_BAD_WORD_TOKENS} tokens, got {ids!r:.80}")
    return [[_integer("bad_words_token_ids", token, 0, 2**31 - 1) for token in ids] for ids in sequences]
