"""Numbers of SamplingParams in HTTP bodies: all are fields, under all of their names, as their declarations say."""

from typing import Any

import msgspec
import pytest

from frontend.http.bodies import ChatBody, CompletionBody, SamplingFields
from frontend.http.ollama.ollama_bodies import OllamaBody, sampling_fields
from frontend.http.sampling import read_sampling
from ipc.errors import InvalidRequestError
from ipc.params.sampling_params import NUMBERS, OF_DRAWS, SamplingParams
from tests.frontend.http.caller import Caller

#: A value of each number that is not its default.
VALUES: dict[str, Any] = {
    "n": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.25,
    "temperature": 0.75,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.25,
    "seed": 11,
    "max_tokens": 33,
    "min_tokens": 3,
    "top_n_sigma": 1.5,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.25,
    "typical_p": 0.75,
    "repeat_last_n": 64,
}
NAMES = [(name, one.name) for one in NUMBERS.values() for name in (one.name, *one.parameter.names)]


def read(kind: type[SamplingFields], defaults: dict[str, Any] | None = None, **fields: Any) -> SamplingParams:
    own: dict[str, Any] = {"messages": []} if kind is ChatBody else {}
    body = msgspec.json.decode(msgspec.json.encode({**own, **fields}), type=kind)
    return read_sampling(body, defaults or {}, max_tokens=None, logprobs=None)


def test_all_numbers_are_tried() -> None:
    assert VALUES.keys() == NUMBERS.keys()
    assert ("repeat_penalty", "repetition_penalty") in NAMES


@pytest.mark.parametrize(("name", "parameter"), NAMES)
def test_a_number_reaches_the_parameters_from_every_body(name: str, parameter: str) -> None:
    value = VALUES[parameter]
    for kind in (ChatBody, CompletionBody):
        assert getattr(read(kind, **{name: value}), parameter) == value
        assert getattr(read(kind, {parameter: value}, **{name: None}), parameter) == value
    body = OllamaBody(model="demo", options={name: value})
    assert sampling_fields(body, 4096, print)[parameter] == value


def test_our_own_name_comes_before_another_engines() -> None:
    assert read(ChatBody, repeat_penalty=1.5, repetition_penalty=1.25).repetition_penalty == 1.25


def test_a_beam_search_takes_no_defaults_of_draws() -> None:
    defaults = {name: VALUES[name] for name in OF_DRAWS}
    params = read(CompletionBody, defaults, use_beam_search=True)
    assert {name: getattr(params, name) for name in OF_DRAWS} == {
        **{name: NUMBERS[name].default for name in OF_DRAWS},
        "temperature": 0.0,
    }
    for name in set(OF_DRAWS) - {"temperature"}:
        with pytest.raises(InvalidRequestError, match=f"^{name}={VALUES[name]} and use_beam_search cannot be combined"):
            read(CompletionBody, use_beam_search=True, **{name: VALUES[name]})


def test_an_option_that_ollama_does_not_know_is_named() -> None:
    noted: list[str] = []
    fields = sampling_fields(OllamaBody(model="demo", options={"nsigma": 1.0}), 4096, noted.append)
    assert noted == ["the option 'nsigma', which is unknown here"]
    assert fields == {"stream": True}


def test_over_http(served: Caller) -> None:
    options = {"top_n_sigma": 1.5, "xtc_probability": 0.5, "xtc_threshold": 0.2}
    assert served.complete([5, 6], max_tokens=3, **options).json["choices"]
    chat = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "stream": False, "options": options}
    assert served.post("/api/chat", chat).json["done"]
    wrong = served.complete([5, 6], max_tokens=3, xtc_probability=2)
    assert wrong.status == 400
    assert "xtc_probability must be in [0, 1], got 2" in wrong.json["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 4.0, "seed": 1e2, "n": 1.0, "top_k": 5.0}),
        ("/v1/completions", {"prompt": [5.0, 6.0], "max_tokens": 2.0, "stop_token_ids": [7.0]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 4.0}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4.0, "top_k": 5.0}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 4.0}),
    ],
)
def test_whole_numbers_may_be_written_as_floats(served: Caller, path: str, fields: dict[str, Any]) -> None:
    answer = served.post(path, {"model": "demo", **fields})
    assert answer.status == 200, answer.body


def test_a_number_that_is_not_whole_is_refused(served: Caller) -> None:
    for value in (4.5, 1e300, "4"):
        answer = served.post("/v1/completions", {"model": "demo", "prompt": "Hi", "max_tokens": value})
        assert answer.status == 400, answer.body
