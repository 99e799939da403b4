"""Receipts of every route's answers, from a real engine: each is verified, and whatever is changed in one is found."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from ipc.keys.signing import make_signing_key
from ipc.records.receipt import Receipt
from tests.core.adapters.peft_files import random_matrices, write_peft
from tests.frontend.http.anthropic.test_messages import events_of as message_events
from tests.frontend.http.anthropic.test_messages import fold as fold_message
from tests.frontend.http.caller import Caller, serving
from tests.frontend.http.ollama.test_ollama import lines
from tests.frontend.http.openai.test_responses import events_of
from tests.frontend.http.openai.test_responses import fold as fold_response
from tests.tools.commands.test_verify import (
    MODEL,
    contents_of,
    first_difference,
    forged,
    found,
    verdicts,
    write_model,
)

HI = [{"role": "user", "content": "Hi"}]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
LENGTH, SEED = 10, 5
SAMPLING = {"temperature": 1.5, "seed": SEED, "ignore_eos": True, "receipt": True}
OLLAMA = {"receipt": True, "options": {"temperature": 1.5, "seed": SEED, "num_predict": LENGTH}}
SIZES: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_model_len": 256, "block_size": 4}


class Site(NamedTuple):
    """A server of a tiny model with an adapter, a store and a key."""

    caller: Caller
    options: dict[str, Any]

    def post(self, path: str, body: dict[str, Any], adapter: bool = False) -> Any:
        answer = self.caller.post(path, {"model": "tuned" if adapter else "tiny", **body})
        assert answer.status == 200, answer.body
        return answer


def write_chat_model(folder: Path, seed: int) -> str:
    path = write_model(folder, seed)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    model = write_chat_model(folder / "model", 1)
    shapes = {"model.layers.0.self_attn.q_proj": (64, MODEL["hidden_size"])}
    adapter = str(write_peft(folder / "tuned", random_matrices(shapes, 4, 1, size=4.0), rank=4, alpha=8.0))
    make_signing_key(str(folder / "key"))
    options = {**SIZES, "model": model, "enable_lora": True, "lora_modules": {"tuned": adapter}}
    flags = [word for name, value in SIZES.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    flags += ["-m", model, "--served-model-name", "tiny", "--enable-lora", "--lora-modules", f"tuned={adapter}"]
    with serving(*flags, "--store", str(folder / "store.db"), "--receipt-key", str(folder / "key")) as caller:
        yield Site(caller, options)


def receipt_in(answer: Any) -> Receipt:
    """The one receipt of an answer."""
    (given,) = answer["receipts"]
    return msgspec.convert(given, Receipt)


def ended(site: Site, response: Any) -> Any:
    """A background response at its end."""
    end = time.monotonic() + 20
    while (now := site.caller.get(f"/v1/responses/{response['id']}").json)["status"] in ("queued", "in_progress"):
        assert time.monotonic() < end, now
        time.sleep(0.02)
    return now


def responses(site: Site, adapter: bool, **fields: Any) -> Any:
    answer = site.post("/v1/responses", {"input": "Hi", "max_output_tokens": LENGTH, **SAMPLING, **fields}, adapter)
    if not fields.get("stream"):
        return answer.json
    events = events_of(answer)
    assert not any("receipts" in event["response"] for event in events[:-1] if "response" in event)
    return fold_response(events)


def stored(site: Site, adapter: bool) -> Any:
    made = responses(site, adapter)
    kept = site.caller.get(f"/v1/responses/{made['id']}").json
    assert kept == made, "the stored response has the same receipt"
    return kept


def background(site: Site, adapter: bool) -> Any:
    begun = responses(site, adapter, background=True)
    assert "receipts" not in begun
    return ended(site, begun)


def background_stream(site: Site, adapter: bool) -> Any:
    last = responses(site, adapter, background=True, stream=True)
    again = site.caller.get(f"/v1/responses/{last['id']}?stream=true")
    assert fold_response(events_of(again)) == last == ended(site, last)
    return last


def messages(site: Site, adapter: bool, **fields: Any) -> Any:
    answer = site.post("/v1/messages", {"messages": HI, "max_tokens": LENGTH, **SAMPLING, **fields}, adapter)
    if not fields.get("stream"):
        return answer.json
    events = message_events(answer)
    fold_message(events)
    return events[-2]


def ollama(site: Site, adapter: bool, path: str, **fields: Any) -> Any:
    return lines(site.post(path, {**OLLAMA, **fields}, adapter))[-1]


def llama_cpp(site: Site, adapter: bool, stream: bool = False) -> Any:
    answer = site.post("/completion", {"prompt": "Hi", "n_predict": LENGTH, **SAMPLING, "stream": stream}, adapter)
    parts = answer.body.decode().split("\n\n")
    return json.loads(parts[-2].removeprefix("data: ")) if stream else answer.json


def chat(site: Site, adapter: bool, stream: bool = False) -> Any:
    body = {"messages": HI, "max_tokens": LENGTH, **SAMPLING, "stream": stream}
    answer = site.post("/v1/chat/completions", body, adapter)
    return answer.events[-1] if stream else answer.json


#: Each gives the part of an answer with its receipt. site, adapter: whether the adapter is the model.
ANSWERS: dict[str, Callable[[Site, bool], Any]] = {
    "responses": responses,
    "responses, streamed": lambda site, adapter: responses(site, adapter, stream=True),
    "responses, stored": stored,
    "responses, background": background,
    "responses, background and streamed": background_stream,
    "messages": messages,
    "messages, streamed": lambda site, adapter: messages(site, adapter, stream=True),
    "ollama": lambda site, adapter: ollama(site, adapter, "/api/chat", messages=HI, stream=False),
    "ollama, streamed": lambda site, adapter: ollama(site, adapter, "/api/chat", messages=HI),
    "ollama, generate": lambda site, adapter: ollama(site, adapter, "/api/generate", prompt="Hi"),
    "llama.cpp": llama_cpp,
    "llama.cpp, streamed": lambda site, adapter: llama_cpp(site, adapter, stream=True),
    "chats": chat,
    "chats, streamed": lambda site, adapter: chat(site, adapter, stream=True),
}


OF_CHATS = ("responses", "messages", "chats")


@pytest.fixture(scope="module")
def receipts(site: Site) -> list[Receipt]:
    """Of each answer in ANSWERS by the model, and then by its adapter."""
    return [receipt_in(answer(site, adapter)) for adapter in (False, True) for answer in ANSWERS.values()]


def test_each_is_verified(site: Site, receipts: list[Receipt]) -> None:
    of_model, of_adapter = receipts[: len(ANSWERS)], receipts[len(ANSWERS) :]
    verified = verdicts(receipts, site.options, [receipts[0].public_key])
    assert [(one.status, one.is_trusted) for one in verified] == [("verified", True)] * len(receipts)
    assert {one.header.adapter for one in of_model} == {""}
    assert len({one.header.adapter for one in of_adapter} - {""}) == 1
    assert {one.header.seed for one in receipts} == {f"{SEED:016x}"}
    same = [contents_of(one).answers for name, one in zip(ANSWERS, of_model, strict=True) if name.startswith(OF_CHATS)]
    assert same == [same[0]] * 9, "one chat with one seed"
    assert len(same[0][0]) == LENGTH


def test_what_is_changed_is_found_at_its_position(site: Site, receipts: list[Receipt]) -> None:
    """A token, a parameter, a seed, and the adapter, in a receipt of each answer whose digests are right."""
    half = len(ANSWERS)
    lies, expected = [], []
    for index, receipt in enumerate(receipts):
        contents, other = contents_of(receipt), receipts[(index + half) % len(receipts)]
        (ids,) = contents.answers
        at = index % len(ids)
        wrong = (ids[at] + 1) % 250
        lies.append(forged(receipt, msgspec.structs.replace(contents, answers=[[*ids[:at], wrong, *ids[at + 1 :]]])))
        expected.append((0, at, ids[at], wrong))
        bias = {**contents.parameters, "logit_bias": {str(ids[at]): -100.0}}
        lies.append(forged(receipt, msgspec.structs.replace(contents, parameters=bias)))
        expected.append((0, ids.index(ids[at]), None, ids[at]))
        assert contents.prompt_token_ids == contents_of(other).prompt_token_ids
        lies.append(forged(receipt, contents, adapter=other.header.adapter))
        expected.append((0, *first_difference(ids, contents_of(other).answers[0])))
    for verdict, wanted in zip(verdicts(lies, site.options), expected, strict=True):
        answer, position, computed, claimed = found(verdict)
        assert (answer, position, claimed) == (wanted[0], wanted[1], wanted[3])
        assert wanted[2] is None or computed == wanted[2]


def test_other_weights_are_found(site: Site, receipts: list[Receipt], tmp_path: Path) -> None:
    other = write_chat_model(tmp_path / "other", 2)
    found_fields = [one.fields for one in verdicts(receipts, {**site.options, "model": other})]
    assert found_fields == [["weights"]] * len(receipts)


def test_without_the_field_there_is_none_and_the_tokens_are_the_same(site: Site) -> None:
    asked, plain = (
        site.post("/v1/messages", {"messages": HI, "max_tokens": LENGTH, **SAMPLING, "receipt": given}).json
        for given in (True, False)
    )
    assert asked.pop("receipts")
    assert {**asked, "id": ""} == {**plain, "id": ""}


def test_an_answer_ends_with_the_token_that_completes_a_stop_string(site: Site) -> None:
    """A stream has fewer tokens then than the engine has sent, and so has its receipt."""
    body: dict[str, Any] = {"messages": HI, "max_tokens": 40, **SAMPLING, "return_token_ids": True}
    text = site.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"]
    body["stop"] = [next(letter for letter in text[5:] if letter.isascii())]
    whole = site.post("/v1/chat/completions", body).json
    events = site.post("/v1/chat/completions", {**body, "stream": True}).events
    made = [receipt_in(whole), receipt_in(events[-1])]
    assert [one.status for one in verdicts(made, site.options)] == ["verified"] * 2
    (choice,) = whole["choices"]
    assert (choice["finish_reason"], len(choice["token_ids"]) < 40) == ("stop", True)
    streamed = [token for event in events for one in event["choices"] for token in one.get("token_ids") or ()]
    assert [contents_of(one).answers for one in made] == [[choice["token_ids"]], [streamed]] == [[streamed]] * 2


def test_a_seed_is_drawn_if_there_is_none(site: Site) -> None:
    body = {"messages": HI, "max_tokens": 2, "receipt": True}
    drawn = {receipt_in(site.post("/v1/messages", body).json).header.seed for _ in range(2)}  # type: ignore[union-attr]
    assert len(drawn) == 2


def test_an_answer_without_tokens_is_refused(site: Site) -> None:
    answer = site.caller.post("/completion", {"prompt": "Hi", "n_predict": 0, "receipt": True})
    assert (answer.status, "receipt" in answer.json["error"]["message"]) == (400, True)
