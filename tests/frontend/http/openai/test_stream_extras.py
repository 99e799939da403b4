"""What streams report beside their text: tokens of the prompt, the usage, and all log probabilities."""

from dataclasses import dataclass
from typing import Any

import pytest

from frontend.http.openai.logprobs import chat_logprobs
from frontend.http.pages.openapi import describe
from frontend.http.routes import ROUTES
from ipc.files.model_files import resolve_model
from tests.frontend.http.caller import Caller, serving
from tests.frontend.http.conftest import FAKE

HI = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 5},
    "/v1/completions": {"prompt": "Hi there", "max_tokens": 5},
}


def test_the_first_event_of_a_chat_has_the_prompts_tokens(served: Caller) -> None:
    body = {**ASKED["/v1/chat/completions"], "return_token_ids": True}
    whole = served.post("/v1/chat/completions", body).json
    events = served.post("/v1/chat/completions", {**body, "stream": True}).events
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in event for event in events[1:])


def test_the_first_event_of_each_completion_has_its_prompts_tokens(served: Caller) -> None:
    body = {"prompt": [[5, 6], [7, 8, 9]], "max_tokens": 4, "return_token_ids": True, "stream": True}
    found: dict[int, list[Any]] = {0: [], 1: []}
    for event in served.post("/v1/completions", body).events:
        for choice in event["choices"]:
            found[choice["index"]].append(choice.get("prompt_token_ids"))
    assert [found[0][0], found[1][0]] == [[5, 6], [7, 8, 9]]
    assert not any(found[0][1:] + found[1][1:])


@pytest.mark.parametrize("path", ASKED)
def test_options_of_a_stream_need_one(served: Caller, path: str) -> None:
    answer = served.post(path, {**ASKED[path], "stream_options": {"include_usage": True}})
    assert (answer.status, answer.json["error"]["param"]) == (400, "stream_options")


def test_a_server_may_report_the_usage_in_every_event() -> None:
    with serving(*FAKE, "-m", str(resolve_model(None)), "--enable-force-include-usage") as caller:
        for path, body in ASKED.items():
            events = caller.post(path, {**body, "stream": True}).events
            assert [event["usage"]["completion_tokens"] for event in events][-2:] == [5, 5]
            assert all(event["usage"]["prompt_tokens"] for event in events)


@dataclass
class Likely:
    """A log probability as answers have it."""

    logprob: float
    rank: int
    decoded_token: str


def test_all_likely_tokens_are_all() -> None:
    likely: Any = {token: Likely(-float(token), token, "x") for token in (1, 2, 3)}
    shown: Any = {num: chat_logprobs([1], [likely], None, num, as_ids=True)["content"] for num in (-1, 0, 2)}
    assert {num: len(content[0]["top_logprobs"]) for num, content in shown.items()} == {-1: 3, 0: 0, 2: 2}


def test_the_description_has_ollamas_form_of_errors() -> None:
    paths = describe(ROUTES)["paths"]
    schema = paths["/api/chat"]["post"]["responses"]["default"]["content"]["application/json"]["schema"]
    assert schema["properties"]["error"] == {"type": "string"}
    schema = paths["/v1/completions"]["post"]["responses"]["default"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/Error"}
