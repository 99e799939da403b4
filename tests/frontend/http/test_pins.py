"""Pins over HTTP: each dialect can ask for them, and its answer says what was promised, found, or refused and why."""

from collections.abc import Iterator
from typing import Any

import pytest

from frontend.llm import LLM
from ipc.files.model_files import resolve_model
from tests.frontend.http.anthropic.test_messages import events_of, fold
from tests.frontend.http.caller import Caller, serving
from tests.frontend.http.conftest import FAKE

TEXT = "The quick brown fox jumps over the lazy dog. " * 20  # some 200 tokens
SIZE = 16


@pytest.fixture(scope="module")
def small() -> Iterator[Caller]:
    """A server whose cache has room for 4800 tokens, of which a tenant may pin 960."""
    options = ("--num-blocks-override", "301", "--max-tenant-pinned-share", "0.2")
    model = ("-m", str(resolve_model(None)), "--served-model-name", "demo")
    with serving(*FAKE, *model, *options) as caller:
        yield caller


@pytest.fixture
def caller(small: Caller) -> Iterator[Caller]:
    """The server, without pins that have names."""
    yield small
    for name in sessions(small):
        if name is not None:
            answer = small.call("DELETE", f"/v1/sessions/{name}")
            assert answer.json == {"id": name, "object": "session", "released": True}


def sessions(caller: Caller) -> dict[str | None, Any]:
    return {one["id"]: one for one in caller.get("/v1/sessions").json["data"]}


def evict(caller: Caller) -> None:
    """Fill the cache with other prompts."""
    for number in range(6):
        assert caller.complete([number + 5, *range(20, 1020)], max_tokens=1).status == 200


def test_a_session_is_found_again_and_the_usage_says_so(caller: Caller) -> None:
    session = {"x-session": "s", "x-session-ttl": "60"}
    body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}
    first = caller.post("/v1/chat/completions", body, session).json["usage"]
    pinned = first["prompt_tokens"] // SIZE * SIZE
    assert first["prompt_tokens_details"] == {"cached_tokens": 0, "pinned_tokens": pinned, "promised_tokens": 0}
    evict(caller)
    body["messages"] = [*body["messages"], {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
    again = caller.post("/v1/chat/completions", body, session).json["usage"]["prompt_tokens_details"]
    assert again["promised_tokens"] >= pinned - SIZE  # the first prompt ended with the answer's beginning
    assert again["cached_tokens"] == again["promised_tokens"]
    (shown,) = sessions(caller).values()
    assert shown["held_tokens"] == shown["pinned_tokens"] == again["pinned_tokens"]
    assert 50 < shown["expires_in"] <= 60
    plain = caller.post("/v1/chat/completions", body).json["usage"]["prompt_tokens_details"]
    assert plain == {"cached_tokens": again["pinned_tokens"]}


def test_what_is_lost_is_told(caller: Caller) -> None:
    session, prompt = {"x-session": "lost"}, {"prompt": list(range(30, 100)), "max_tokens": 1}
    caller.post("/v1/completions", prompt, session)
    with LLM(connect=caller.connect) as llm:
        llm.reset_prefix_cache()
    details = caller.post("/v1/completions", prompt, session).json["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 0, "pinned_tokens": 64, "promised_tokens": 64}


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}, 1),
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 2}, 1),
        ("/v1/responses", {"input": TEXT, "max_output_tokens": 2}, 1),
        ("/v1/messages", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}, 1),
        ("/api/chat", {"model": "demo", "messages": [{"role": "user", "content": TEXT}], "stream": False}, 1),
        ("/api/generate", {"model": "demo", "prompt": TEXT, "stream": False}, 1),
        ("/completion", {"prompt": TEXT, "n_predict": 2}, 1),
    ],
)
def test_every_dialect_has_sessions(caller: Caller, path: str, body: dict[str, Any], count: int) -> None:
    if path.startswith("/api"):
        body = {**body, "options": {"num_predict": 2}}
    answer = caller.post(path, body, {"x-session": "all"})
    assert answer.status == 200, answer.body
    assert sessions(caller)["all"]["held_tokens"] > 150
    if path != "/completion":
        assert b'"pinned_tokens":' in answer.body
    answer = caller.post(path, body, {"x-session": "n" * 300})
    assert (answer.status, b"300 characters" in answer.body) == (400, True)


@pytest.mark.parametrize("name", ["me; ttl=600", "me,you", "me/you"])
def test_a_header_with_separators_is_no_name(caller: Caller, name: str) -> None:
    """Otherwise a time in it would be taken as a part of the name, and paths could not name the session."""
    answer = caller.post("/v1/completions", {"prompt": TEXT, "max_tokens": 1}, {"x-session": name})
    assert (answer.status, b"x-session-ttl" in answer.body) == (400, True)
    assert name not in sessions(caller)


def test_a_retention_pins_for_a_day_under_the_key(caller: Caller) -> None:
    for path, body in (
        ("/v1/responses", {"input": TEXT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
    ):
        fields = {"prompt_cache_key": "agent", "prompt_cache_retention": "24h"}
        assert caller.post(path, {**body, **fields}).status == 200
        assert sessions(caller)["agent"]["expires_in"] > 86_000
    usage = caller.chat(TEXT, prompt_cache_key="other", prompt_cache_retention="in_memory").json["usage"]
    assert "pinned_tokens" not in usage["prompt_tokens_details"]
    assert "other" not in sessions(caller)
    refused = caller.chat(TEXT, prompt_cache_retention="1y")
    assert refused.status == 400
    assert refused.json["error"]["param"] == "prompt_cache_retention"


def test_cache_control_pins_up_to_its_block(caller: Caller) -> None:
    ephemeral = {"type": "ephemeral", "ttl": "1h"}
    system = [{"type": "text", "text": TEXT, "cache_control": ephemeral}, {"type": "text", "text": "Be brief."}]
    body = {"system": system, "max_tokens": 2, "messages": [{"role": "user", "content": "one"}]}
    usage = caller.post("/v1/messages", body).json["usage"]
    alone = caller.post("/tokenize", {"prompt": TEXT}).json["count"]
    assert alone - SIZE < usage["pinned_tokens"] <= alone + SIZE  # not the rest of the prompt
    assert (
        usage["pinned_tokens"]
        < caller.post("/v1/messages/count_tokens", {**body, "model": "demo"}).json["input_tokens"]
    )
    evict(caller)
    body["messages"] = [{"role": "user", "content": [{"type": "text", "text": "two", "cache_control": ephemeral}]}]
    streamed = fold(events_of(caller.post("/v1/messages", {**body, "stream": True})))["usage"]
    assert streamed["promised_tokens"] == streamed["cache_read_input_tokens"] == usage["pinned_tokens"]
    assert streamed["pinned_tokens"] > usage["pinned_tokens"]  # now the whole prompt is
    held = [one for name, one in sessions(caller).items() if name is None]
    assert 3500 < held[0]["expires_in"] <= 3600


@pytest.mark.parametrize(
    ("control", "says"),
    [("ephemeral", "must be"), ({"type": "x"}, "must be"), ({"type": "ephemeral", "ttl": "2h"}, "5m or 1h")],
)
def test_wrong_cache_controls_are_refused(caller: Caller, control: Any, says: str) -> None:
    blocks = [{"type": "text", "text": "a", "cache_control": control}]
    answer = caller.post("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": blocks}]})
    assert (answer.status, says in answer.json["error"]["message"]) == (400, True)


def test_five_breakpoints_are_too_many(caller: Caller) -> None:
    block = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    answer = caller.post("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [block] * 5}]})
    assert (answer.status, "at most 4" in answer.json["error"]["message"]) == (400, True)


def test_a_share_is_a_bound_that_refuses_sessions_and_tells_hints(caller: Caller) -> None:
    prompt = {"prompt": list(range(40, 1100)), "max_tokens": 1}
    refused = caller.post("/v1/completions", prompt, {"x-session": "big"})
    assert (refused.status, refused.json["error"]["code"]) == (429, "pin_refused")
    assert "its share is 960 (max_tenant_pinned_share)" in refused.json["error"]["message"]
    assert refused.headers["x-should-retry"] == "false"
    hinted = caller.post("/v1/completions", {**prompt, "prompt_cache_retention": "24h"})
    details = hinted.json["usage"]["prompt_tokens_details"]
    assert details["pinned_tokens"] == 0
    assert "its share is 960" in details["pin_refusal"]


def test_forks_and_releases(caller: Caller) -> None:
    caller.post("/v1/completions", {"prompt": TEXT, "max_tokens": 1}, {"x-session": "trunk"})
    forked = caller.post("/v1/sessions/trunk/fork", {"to": "branch", "ttl": 30})
    assert forked.json == {"id": "branch", "object": "session", "forked_from": "trunk"}
    assert caller.post("/v1/sessions/trunk/release", {}).status == 200
    assert set(sessions(caller)) - {None} == {"branch"}
    assert sessions(caller)["branch"]["held_tokens"] > 150
    for answer in (
        caller.post("/v1/sessions/trunk/fork", {"to": "x"}),
        caller.call("DELETE", "/v1/sessions/trunk"),
    ):
        assert (answer.status, "there is no pin 'trunk'" in answer.json["error"]["message"]) == (404, True)
    assert caller.post("/v1/sessions/branch/fork", {"to": "x", "ttl": 0}).status == 400
    assert caller.post("/v1/completions", {"prompt": ["a", "b"]}, {"x-session": "two"}).status == 400
