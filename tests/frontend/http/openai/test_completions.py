"""/v1/completions and the routes around it."""

from typing import Any

import pytest

from frontend.llm import LLM
from ipc.params.sampling_params import SamplingParams
from tests.frontend.http.caller import Caller


def expected(llm: LLM, prompt: Any, **params: Any) -> Any:
    return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)


def test_every_form_of_a_prompt(served: Caller, llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("Once upon a time")
    texts = [one.outputs[0].text for one in expected(llm, ["Once upon a time", "Two"], max_tokens=9, temperature=0)]
    for prompt in ("Once upon a time", ids, ["Once upon a time"], [ids]):
        (choice,) = served.complete(prompt, max_tokens=9, temperature=0).json["choices"]
        assert choice["text"] == texts[0]
    sampling = {"max_tokens": 9, "temperature": 0.9, "seed": 2, "n": 2}
    outputs = expected(llm, ["Once upon a time", "Two"], **sampling)
    both = served.complete(["Once upon a time", "Two"], **sampling).json
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in both["choices"]] == [one.text for output in outputs for one in output.outputs]
    assert both["usage"]["completion_tokens"] == 36


def test_a_stream_is_the_whole_answer(served: Caller) -> None:
    body = {"max_tokens": 30, "temperature": 0.9, "seed": 1, "n": 2}
    whole = served.complete(["One", "Two"], **body).json["choices"]
    events = served.complete(["One", "Two"], **body, stream=True).events
    for index in range(4):
        choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in choices) == whole[index]["text"]
        assert [choice["finish_reason"] for choice in choices][-1] == "length"


def test_max_tokens_is_16_where_nothing_else_is_said(served: Caller) -> None:
    assert served.complete("One", ignore_eos=True).json["usage"]["completion_tokens"] == 16


def test_echo_with_logprobs(served: Caller, llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("Once upon a time")
    answer = served.complete([ids], max_tokens=1, temperature=0, echo=True, logprobs=1).json
    (output,) = expected(llm, {"prompt_token_ids": ids}, max_tokens=1, temperature=0, logprobs=1, prompt_logprobs=1)
    choice = answer["choices"][0]
    assert choice["text"] == "Once upon a time" + output.outputs[0].text
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    wanted = [likely[token].logprob for token, likely in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
    assert logprobs["token_logprobs"][1:-1] == pytest.approx(wanted)
    for text, value, top in list(zip(*map(logprobs.get, ("tokens", "token_logprobs", "top_logprobs")), strict=True))[
        1:
    ]:
        assert top[text] == value  # the very float: evaluations compare them with ==
    assert logprobs["text_offset"] == [sum(map(len, logprobs["tokens"][:i])) for i in range(len(ids) + 1)]
    assert logprobs["tokens"][0] == "Once"


def test_echo_of_nothing_but_the_prompt(served: Caller) -> None:
    answer = served.complete("Once upon", max_tokens=0, echo=True, logprobs=0).json
    assert answer["choices"][0]["text"] == "Once upon"
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["choices"][0]["logprobs"]["tokens"] == ["Once", " upon"]
    events = served.complete("Once upon", max_tokens=2, echo=True, stream=True).events
    assert events[0]["choices"][0]["text"] == "Once upon"


def test_tokens_as_ids(served: Caller) -> None:
    choice = served.complete(
        "One", max_tokens=3, logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True
    ).json["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]


def test_models(served: Caller) -> None:
    listed = served.get("/v1/models").json
    assert [card["id"] for card in listed["data"]] == ["demo", "other/name"]
    assert listed["data"][0]["max_model_len"] == 4096
    assert served.get("/v1/models/other/name").json["id"] == "other/name"
    assert served.complete("One", model="other/name").json["model"] == "other/name"


def test_tokenize_and_back(served: Caller, llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    text = "Grüße, 世界 🌍"
    answer = served.post("/tokenize", {"prompt": text, "return_token_strs": True}).json
    assert answer["tokens"] == tokenizer.encode(text)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 4096)
    assert len(answer["token_strs"]) == answer["count"]
    assert served.post("/detokenize", {"tokens": answer["tokens"]}).json == {"prompt": text, "content": text}
    assert served.post("/tokenize", {"content": text}).json["tokens"] == tokenizer.encode(
        text, add_special_tokens=False
    )
    chat = served.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}).json
    assert tokenizer.decode(chat["tokens"], skip_special_tokens=False).endswith("<|im_start|>assistant\n")
    info = served.get("/tokenizer_info").json
    assert info["eos_token"] == tokenizer.eos_token
    assert info["chat_template"] == tokenizer.chat_template


def test_health_and_version(served: Caller) -> None:
    for path in ("/health", "/live", "/ready", "/ping"):
        answer = served.get(path)
        assert (answer.status, answer.body) == (200, b"")
    assert served.get("/version").json["version"]
    assert served.call("HEAD", "/health").status == 200


def test_a_streamed_echo_with_logprobs_is_the_whole_one_in_parts(served: Caller) -> None:
    """The first event of each prompt has the prompt's columns; all events joined are those of the whole answer."""
    fields = {"max_tokens": 6, "temperature": 0, "echo": True, "logprobs": 2}
    prompts = ["Once upon a time", "Nävïe \U0001f600 text"]
    whole = served.complete(prompts, **fields).json["choices"]
    events = served.complete(prompts, **fields, stream=True).events
    for index, wanted in enumerate(whole):
        choices = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert choices[0]["text"] == prompts[index]
        assert choices[0]["logprobs"]["token_logprobs"][0] is None
        assert "".join(one["text"] for one in choices) == wanted["text"]
        assert choices[-1]["finish_reason"] == wanted["finish_reason"]
        for column, values in wanted["logprobs"].items():
            assert [value for one in choices for value in one["logprobs"][column]] == values, column


def test_a_streamed_echo_of_nothing_but_the_prompt(served: Caller) -> None:
    fields = {"max_tokens": 0, "echo": True, "stream": True, "stream_options": {"include_usage": True}}
    for more in ({}, {"logprobs": 0}):
        *events, usage = served.complete("Once upon", **fields, **more).events
        assert "".join(event["choices"][0]["text"] for event in events) == "Once upon"
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert usage["usage"]["completion_tokens"] == 0
    assert served.complete("x", n=2, temperature=1, echo=True, logprobs=0, stream=True).json["error"]["param"] == "echo"
