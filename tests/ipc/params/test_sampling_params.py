"""SamplingParams: wrong values are refused by name, and what is accepted is what the wire's types allow."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from ipc.errors import EngineCoreError, InvalidRequestError, UnsupportedParameterError
from ipc.params.list_parameters import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from ipc.params.sampling_params import (
    MIN_TEMPERATURE,
    NUMBERS,
    REFUSED,
    RequestOutputKind,
    SamplingParams,
    check_num_logprobs,
)
from tests.make_sampling import PAGE, made

NAN, INFINITY = math.nan, math.inf
FLOATS = {
    "temperature": (0.0, 1e4),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-4, 1e4),
    "top_n_sigma": (-1.0, 1e4),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
}
TOKEN_OPTIONS = ("logit_bias", "allowed_token_ids", "bad_words", "bad_words_token_ids")
INTEGERS = {
    "n": (1, 128),
    "top_k": (-1, 2**31 - 1),
    "seed": (-(2**63), 2**64 - 1),
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "repeat_last_n": (-1, 8192),
}
SWITCHES = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "spaces_between_special_tokens",
)


def make(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": None, **options})


def wire(params: SamplingParams) -> SamplingParams:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)


def test_every_parameter_is_checked_by_some_rule() -> None:
    checked = {
        "logprobs",
        "truncate_prompt_tokens",
        "prompt_logprobs",
        *FLOATS,
        *INTEGERS,
        *SWITCHES,
        *REFUSED,
        *TOKEN_OPTIONS,
        "stop",
        "stop_token_ids",
        "structured_outputs",
        "output_kind",
        *("use_beam_search", "best_of", "length_penalty", "early_stopping"),  # tests/ipc/params/test_beam_search.py
    }
    assert checked == set(SamplingParams.__struct_fields__)


def test_every_number_is_declared() -> None:
    assert {*FLOATS, *INTEGERS} == {*NUMBERS}
    for name, (low, high) in (FLOATS | INTEGERS).items():
        assert (NUMBERS[name].parameter.low, NUMBERS[name].parameter.high) == (low, high)
        assert NUMBERS[name].kind is (float if name in FLOATS else int)


@pytest.mark.checkout  # docs/
def test_the_page_of_parameters_is_that_of_the_code() -> None:
    """docs/sampling.md: `make map` writes its table."""
    page = PAGE.read_text()
    assert page == made(page)
    assert page.count("\n| `") == len(NUMBERS)


@pytest.mark.parametrize("name", sorted(FLOATS))
def test_floats(name: str) -> None:
    low, high = FLOATS[name]
    for value in (high, (low + high) / 2, 1):
        assert getattr(make(**{name: value}), name) == value
        assert type(getattr(make(**{name: value}), name)) is float
    for value in (NAN, INFINITY, -INFINITY, low - 1e-9, high + 1e-3, low - 1, 10**400):
        with pytest.raises(InvalidRequestError, match=f"^{name} must be in \\[{low:g}, {high:g}\\], got "):
            make(**{name: value})
    for wrong in ("0.5", None, True, [0.5], 0.5j, b"1"):
        with pytest.raises(InvalidRequestError, match=f"^{name} must be a number in .*, got "):
            make(**{name: wrong})


@pytest.mark.parametrize("name", sorted(INTEGERS))
def test_integers(name: str) -> None:
    low, high = INTEGERS[name]
    for value in (low, high):
        make(**{name: value})
    for value in (low - 1, high + 1, 10**400):
        with pytest.raises(InvalidRequestError, match=f"^{name} must be in \\[{low}, {high}\\], got {value}"):
            make(**{name: value})
    for wrong in ("3", 3.0, 3.5, NAN, True, [3], b"3"):
        with pytest.raises(InvalidRequestError, match=f"^{name} must be an integer in .*, got "):
            make(**{name: wrong})


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("value", [0, 1, None, "True", 1.0])
def test_switches(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name} must be True or False, got {value!r}"):
        make(**{name: value})


def test_temperature() -> None:
    assert make(temperature=0).temperature == 0.0
    assert make(temperature=1e-9).temperature == MIN_TEMPERATURE
    assert make(temperature=MIN_TEMPERATURE).temperature == MIN_TEMPERATURE


def test_top_p_zero_says_what_to_do() -> None:
    with pytest.raises(InvalidRequestError, match=r"top_p must be in \(0, 1\], got 0.0; .* set temperature=0"):
        make(top_p=0)


def test_top_k_of_all() -> None:
    assert [make(top_k=k).top_k for k in (-1, 0, 5)] == [0, 0, 5]


def test_what_turns_llama_cpps_options_off_is_one_value() -> None:
    assert [make(top_n_sigma=sigma).top_n_sigma for sigma in (-1, -0.5, 0, 1.5)] == [0.0, 0.0, 0.0, 1.5]


def test_seeds_are_64_bits() -> None:
    assert [make(seed=seed).seed for seed in (None, 0, 2**64 - 1)] == [None, 0, 2**64 - 1]
    assert make(seed=-1).seed is None  # "no seed", as in vLLM
    assert make(seed=-2).seed == 2**64 - 2
    assert make(seed=-(2**63)).seed == 2**63


def test_lengths() -> None:
    assert SamplingParams().max_tokens == 16
    assert SamplingParams(max_tokens=3, min_tokens=3).min_tokens == 3
    assert make(min_tokens=10**6).min_tokens == 10**6
    with pytest.raises(InvalidRequestError, match="min_tokens=17 max_tokens=16"):
        SamplingParams(min_tokens=17)


def test_stop_strings() -> None:
    wrong: Any
    assert make().stop_strings == []
    assert make(stop="a").stop_strings == ["a"]
    assert make(stop=("a", "b")).stop_strings == make(stop=["a", "b"]).stop_strings == ["a", "b"]
    assert make(stop=["x" * MAX_STOP_STRING_CHARS] * MAX_STOP_STRINGS).stop_strings
    for wrong in (3, b"a", {"a": 1}, {"a"}, True):
        with pytest.raises(InvalidRequestError, match="stop must be a string or a list of strings"):
            make(stop=wrong)
    for wrong in ("", ["a", ""], ["a", 3], [None], "x" * (MAX_STOP_STRING_CHARS + 1)):
        with pytest.raises(InvalidRequestError, match="stop strings have 1 to 256 characters"):
            make(stop=wrong)
    with pytest.raises(InvalidRequestError, match="at most 16 stop strings are allowed, got 17"):
        make(stop=["a"] * 17)
    with pytest.raises(InvalidRequestError, match=r"valid Unicode; '\\ud800x' has a lone surrogate"):
        make(stop=["\N{SNOWMAN}", "\ud800x"])
    with pytest.raises(InvalidRequestError, match="stop strings need text"):
        make(stop="a", detokenize=False)


def test_stop_token_ids() -> None:
    wrong: Any
    assert make(stop_token_ids=(3, 0)).stop_token_ids == [3, 0]
    assert make(stop_token_ids=[1] * MAX_STOP_TOKEN_IDS).stop_token_ids
    for wrong in (3, "3", {3}, [1] * (MAX_STOP_TOKEN_IDS + 1)):
        with pytest.raises(InvalidRequestError, match="stop_token_ids must be a list of at most 1024 token ids"):
            make(stop_token_ids=wrong)
    for wrong in ([-1], [2**31], [1.0], [True], [None], ["1"]):
        with pytest.raises(InvalidRequestError, match="stop_token_ids must be"):
            make(stop_token_ids=wrong)


def test_the_callers_lists_are_not_kept() -> None:
    strings, ids = ["a"], [1]
    params = make(stop=strings, stop_token_ids=ids)
    strings.append("b")
    ids.append(2)
    assert (params.stop_strings, params.stop_token_ids) == (["a"], [1])


def test_output_kind() -> None:
    wrong: Any
    assert make(output_kind=2).output_kind is RequestOutputKind.FINAL_ONLY
    for wrong in (3, -1, "DELTA", None, []):
        with pytest.raises(InvalidRequestError, match=r"output_kind must be one of \['CUMULATIVE', 'DELTA', 'FINAL_ON"):
            make(output_kind=wrong)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_unsupported_parameters_are_refused_by_name(name: str) -> None:
    default = REFUSED[name].default
    for value in (2, 0.5, NAN, "x", [1], {1: 0.5}, not default, object()):
        with pytest.raises(UnsupportedParameterError, match=f"^{name}=.* is not supported by this version; leave it"):
            make(**{name: value})
    assert getattr(make(**{name: default}), name) is default


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("logits_processors", [print], "use logit_bias, allowed_token_ids or bad_words"),
        ("guided_decoding", {"json": {}}, r"use structured_outputs=StructuredOutputsParams\(...\)"),
        ("skip_clone", True, "copied for every request"),
    ],
)
def test_a_refusal_says_what_to_do_instead(name: str, value: object, instead: str) -> None:
    with pytest.raises(UnsupportedParameterError, match=f"^{name}=.* is not supported by this version; .*{instead}"):
        make(**{name: value})


def test_from_optional() -> None:
    names = set(SamplingParams.__struct_fields__)
    assert SamplingParams.from_optional() == SamplingParams()
    assert SamplingParams.from_optional(**dict.fromkeys(names - {"max_tokens"})) == SamplingParams()
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None  # as in vLLM: no bound
    given = SamplingParams.from_optional(n=2, temperature=None, top_p=0.5, stop="x", logprobs=0, seed=None)
    assert given == SamplingParams(n=2, top_p=0.5, stop="x", logprobs=0)
    with pytest.raises(InvalidRequestError, match="top_p must be"):
        SamplingParams.from_optional(top_p=2)
    with pytest.raises(InvalidRequestError, match="best_of=2"):
        SamplingParams.from_optional(best_of=2)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_how_many_logprobs_an_engine_tells(name: str) -> None:
    for count, max_logprobs in ((None, 0), (0, 0), (20, 20), (50, 50), (-1, 50), (-1, -1), (10**6, -1)):
        check_num_logprobs(make(**{name: count}), vocab_size=50, max_logprobs=max_logprobs)
    for count, max_logprobs, asked in ((1, 0, 1), (21, 20, 21), (-1, 49, 50)):
        with pytest.raises(
            InvalidRequestError,
            match=f"^{name}={count} asks for {asked} .* at most {max_logprobs}: .* max_logprobs \\(-1",
        ):
            check_num_logprobs(make(**{name: count}), vocab_size=50, max_logprobs=max_logprobs)


def test_the_error_is_a_value_error_of_ours() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make(n=129)
    assert isinstance(caught.value, (EngineCoreError, ValueError))


@pytest.mark.parametrize(
    "options",
    [
        {"n": 3, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": -0.0},
        {"bad_words": [], "logit_bias": {}, "bad_words_token_ids": [], "extra_args": {}},
        {"logit_bias": {"7": 3, 8: -1e9}, "allowed_token_ids": (5, 3, 5), "bad_words": ("x",)},
        {"bad_words_token_ids": ((1, 2), [3]), "presence_penalty": -2, "repetition_penalty": 2},
        {"logprobs": -1, "prompt_logprobs": 20},
        {"temperature": 0, "top_p": 1, "min_p": 0, "top_k": -1, "seed": -1},
        {"stop": "x", "stop_token_ids": (), "output_kind": 1, "max_tokens": 2**31 - 1},
        {},
    ],
)
def test_whatever_is_accepted_survives_the_wire(options: dict[str, Any]) -> None:
    """Values equal to a default but of another type would be refused by the core's decoder."""
    params = make(**options)
    assert wire(params) == params
    assert wire(wire(params)) == params


def test_logit_bias() -> None:
    wrong: Any
    assert make(logit_bias={"7": 3, 8: -1e9, 9: 0.5}).logit_bias == {7: 3.0, 8: -100.0, 9: 0.5}
    assert make(logit_bias={"7": 3, "08": -1e9, "9": 0.5}).logit_bias == {7: 3.0, 8: -100.0, 9: 0.5}
    assert make(logit_bias={}).logit_bias is None
    for wrong in ([], 3, "x", [(1, 2)]):
        with pytest.raises(InvalidRequestError, match="logit_bias must map token ids to numbers, got "):
            make(logit_bias=wrong)
    for wrong in (NAN, None, "1", True):
        with pytest.raises(InvalidRequestError, match="logit_bias of token 7 must be a number, got "):
            make(logit_bias={7: wrong})
        with pytest.raises(InvalidRequestError, match=r"logit_bias of token '?7'? must be a number, got "):
            make(logit_bias={"7": wrong})
    for wrong in (-1, 2**31, 1.5, True, "x", "-1", "1.0", str(2**31), "9" * 5000):
        with pytest.raises(InvalidRequestError, match="a token id in logit_bias must be "):
            make(logit_bias={wrong: 1.0})


def test_allowed_token_ids() -> None:
    wrong: Any
    assert make(allowed_token_ids=(5, 3, 5)).allowed_token_ids == [3, 5]
    for wrong in ([], {}, 3, "x", {3}):
        with pytest.raises(InvalidRequestError, match="allowed_token_ids must be a list of at least one token id"):
            make(allowed_token_ids=wrong)
    for wrong in ([-1], [2**31], [1.0], [None]):
        with pytest.raises(InvalidRequestError, match="allowed_token_ids must be "):
            make(allowed_token_ids=wrong)


def test_bad_words() -> None:
    wrong: Any
    assert make(bad_words=("a", " b")).bad_words == ["a", " b"]
    for wrong in ("word", 3, {"a"}, ["a"] * 257):
        with pytest.raises(InvalidRequestError, match="bad_words must be a list of at most 256 strings"):
            make(bad_words=wrong)
    for wrong in ("", " ", 3, None, "x" * 257):
        with pytest.raises(InvalidRequestError, match="a bad word has 1 to 256 characters, not all of them spaces"):
            make(bad_words=[wrong])
    with pytest.raises(InvalidRequestError, match="valid Unicode"):
        make(bad_words=["\ud800"])
    for wrong in ([[]], [[1] * 65], [3]):
        with pytest.raises(InvalidRequestError, match="a bad word has 1 to 64 tokens"):
            make(bad_words_token_ids=wrong)
    for wrong in (3, "x", [[1]] * 513):
        with pytest.raises(InvalidRequestError, match="at most 512 lists of token ids"):
            make(bad_words_token_ids=wrong)
    with pytest.raises(InvalidRequestError, match="bad_words_token_ids must be in"):
        make(bad_words_token_ids=[[1, -1]])


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_numbers_of_logprobs(name: str) -> None:
    for value in (None, -1, 0, 20, 2**31 - 1):  # how many is the engine's to say
        assert getattr(make(**{name: value}), name) == value
    assert (getattr(make(**{name: True}), name), getattr(make(**{name: False}), name)) == (1, None)
    for wrong in (-2, 1.0, "1", []):
        with pytest.raises(InvalidRequestError, match=f"{name} must be "):
            make(**{name: wrong})


def test_several_greedy_choices_would_be_one() -> None:
    assert make(n=2, temperature=0.5).n == 2
    with pytest.raises(InvalidRequestError, match="n must be 1 for greedy decoding, which has one answer; got n=2"):
        make(n=2, temperature=0)


def test_truncation() -> None:
    for value in (None, -1, 1, 2**31 - 1):
        assert make(truncate_prompt_tokens=value).truncate_prompt_tokens == value
    for wrong in (0, -2, 1.0, True, "1"):
        with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens must be "):
            make(truncate_prompt_tokens=wrong)


def test_numpy_scalars_are_numbers() -> None:
    params = make(temperature=np.float32(0.5), max_tokens=np.int64(7), seed=np.uint64(3))
    assert (params.temperature, params.max_tokens, params.seed) == (0.5, 7, 3)
    assert [type(value) for value in (params.temperature, params.max_tokens, params.seed)] == [float, int, int]


def test_a_clone_shares_nothing() -> None:
    params = make(stop=["x"], logit_bias={1: 2.0})
    clone = params.clone()
    assert clone == params
    clone.stop.append("y")
    assert params.stop == ["x"]


@pytest.mark.parametrize("name", ["prompt_logprob_token_ids", "stream_interval", "thinking_token_budget"])
def test_parameters_of_vllm_that_are_not_here_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedParameterError, match=f"{name}=1 is not supported"):
        make(**{name: 1})


def test_what_asks_for_nothing_is_accepted() -> None:
    params = make(spaces_between_special_tokens=False, routed_experts_prompt_start=0)
    assert (params.spaces_between_special_tokens, params.routed_experts_prompt_start) == (True, None)
    with pytest.raises(InvalidRequestError, match="routed_experts_prompt_start=1 is not supported"):
        make(routed_experts_prompt_start=1)
    with pytest.raises(InvalidRequestError, match="min_tokens must be greater than or equal to 0"):
        make(min_tokens=-1)
