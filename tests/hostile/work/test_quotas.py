"""A key that is out of quota costs nothing, and what a request may take is known before it is read."""

from collections.abc import Iterator
from typing import Any

import pytest

from ipc.files.model_files import resolve_model
from tests.frontend.http.caller import Answer, Caller, serving
from tests.frontend.http.callers.test_access import bearer, line

TEXT = "lorem ipsum dolor " * 1000


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(
        line("out", "out", "rpm=1")
        + line("counter", "counter", "rpm=4")
        + line("one", "one", "concurrent=1")
        + line("small", "small", "tpm=200")
        + line("other", "other", "models=other")
        + line("alice", "alice")
    )
    model = ("-m", str(resolve_model(None)), "--served-model-name", "demo", "--executor-option", "vocab_size=49152")
    with serving("--executor", "fake", *model, "--api-key-file", str(path)) as caller:
        yield caller


def complete(caller: Caller, secret: str, **body: Any) -> Answer:
    return caller.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 2, **body}, bearer(secret))


def test_a_key_out_of_quota_is_refused_by_its_head(keyed: Caller) -> None:
    assert complete(keyed, "out").status == 200
    head = b"POST /%b HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer out\r\ncontent-length: 8000000\r\n\r\n"
    for path in (b"v1/completions", b"v1/chat/completions", b"tokenize", b"v1/messages/count_tokens", b"v1/embeddings"):
        with keyed.socket() as peer:
            peer.sendall(head % path)  # and no body
            answer = peer.recv(4096)
        assert answer.startswith(b"HTTP/1.1 429 "), (path, answer)
        assert b"retry-after" in answer
    assert keyed.get("/v1/models", bearer("out")).status == 200


def test_requests_that_only_count_take_quota(keyed: Caller) -> None:
    chat = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
    asked = [("/tokenize", {"prompt": TEXT}), ("/detokenize", {"tokens": [5]}), ("/v1/messages/count_tokens", chat)]
    found = [keyed.post(path, body, bearer("counter")).status for path, body in asked]
    found.append(keyed.post("/tokenize", {"wrong": 1}, bearer("counter")).status)  # a wrong one too
    found.append(keyed.post("/tokenize", {"prompt": "x"}, bearer("counter")).status)
    assert found == [200, 200, 200, 400, 429]


def test_a_request_that_has_ended_runs_no_longer(keyed: Caller) -> None:
    """However it ends: whole, refused, wrong, left by its peer."""
    for _ in range(3):
        assert complete(keyed, "one").status == 200
        assert complete(keyed, "one", prompt=[10**6]).status == 400
        assert keyed.post("/v1/completions", b"{", bearer("one")).status == 400
        assert keyed.post("/tokenize", {"prompt": "x"}, bearer("one")).status == 200
        with keyed.socket() as peer:
            head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer one\r\n"
            peer.sendall(head + b"content-length: 99\r\n\r\n{")
        assert complete(keyed, "one", stream=True).status == 200


def test_what_a_key_has_not_is_refused_before_it_is_read(keyed: Caller) -> None:
    beams = {"use_beam_search": True, "best_of": 32, "n": 1, "max_tokens": 30, "temperature": 0}
    for body in (beams, {"prompt": [1] * 200}, {"n": 100, "temperature": 1}, {"prompt": "#" * 81 * 200}):
        answer = complete(keyed, "small", **body)
        assert answer.status == 403, body
        assert "the key has 200 a minute" in answer.json["error"]["message"]
    assert complete(keyed, "alice", **beams).status == 200
    assert complete(keyed, "small").status == 200


@pytest.mark.parametrize("path", ["/metrics", "/v1/load", "/tokenizer_info"])
def test_a_key_for_other_models_learns_nothing_of_this_one(keyed: Caller, path: str) -> None:
    assert keyed.get(path, bearer("other")).status == 403
    assert keyed.get(path, bearer("alice")).status == 200


def test_the_limit_is_said_once_and_with_the_field_that_has_the_prompt(keyed: Caller) -> None:
    limit = keyed.get("/v1/models", bearer("alice")).json["data"][0]["max_model_len"]
    long = "1 " * (limit + 5)
    message = {"role": "user", "content": long}
    for path, body, param in (
        ("/v1/completions", {"prompt": long}, "prompt"),
        ("/v1/completions", {"prompt": [5] * (limit + 5)}, "prompt"),
        ("/v1/chat/completions", {"messages": [message]}, "messages"),
        ("/v1/responses", {"input": long}, "input"),
    ):
        error = keyed.post(path, body, bearer("alice")).json["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert error["message"].count(f"{limit} tokens") == 1, error
        assert error["message"].count("maximum context length") == 1
