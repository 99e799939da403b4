"""Ollama's API: the same answers, as lines of JSON."""

import json
from typing import Any

import pytest

from frontend.http.ollama.ollama_bodies import OllamaBody, sampling_fields, with_parts
from frontend.llm import LLM
from ipc.files.model_files import resolve_model
from ipc.params.sampling_params import SamplingParams
from tests.frontend.http.caller import Answer, Caller

CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
OPTIONS = {"num_predict": 12, "temperature": 0, "num_thread": 2, "num_ctx": 2048}


def lines(answer: Answer) -> list[Any]:
    return [json.loads(line) for line in answer.body.splitlines()]


def test_a_chat_streams_unless_told_otherwise(served: Caller, llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0)
    wanted = llm.chat(CHAT["messages"], params, use_tqdm=False)[0]
    answer = served.post("/api/chat", {**CHAT, "options": OPTIONS})
    assert answer.headers["content-type"] == "application/x-ndjson"
    found = lines(answer)
    assert "".join(one["message"]["content"] for one in found) == wanted.outputs[0].text
    assert [one["done"] for one in found] == [False] * (len(found) - 1) + [True]
    end = found[-1]
    assert (end["eval_count"], end["prompt_eval_count"]) == (12, len(wanted.prompt_token_ids))
    assert end["done_reason"] == "length"
    assert end["total_duration"] >= end["eval_duration"] > 0
    whole = served.post("/api/chat", {**CHAT, "model": "demo:latest", "options": OPTIONS, "stream": False}).json
    assert whole["message"]["content"] == wanted.outputs[0].text
    assert whole["done"] is True


def test_generate_with_and_without_the_template(served: Caller, llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    body = {"model": "demo", "prompt": "Hi", "options": OPTIONS, "stream": False}
    found = served.post("/api/generate", {**body, "system": "Be brief."}).json
    assert found["response"] == llm.chat(chat, params, use_tqdm=False)[0].outputs[0].text
    raw = served.post("/api/generate", {**body, "raw": True}).json
    assert raw["response"] == llm.generate("Hi", params, use_tqdm=False)[0].outputs[0].text


def test_a_format_is_closed_as_llama_cpp_closes_it() -> None:
    inner = {"type": "object", "properties": {"b": {}}, "additionalProperties": True}
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"properties": {"c": {}}}}, "i": inner}}
    fields = sampling_fields(OllamaBody(model="demo", format=schema), 100, print)
    found = fields["response_format"]["json_schema"]["schema"]
    assert found["additionalProperties"] is False
    assert found["properties"]["a"]["items"]["additionalProperties"] is False
    assert found["properties"]["i"] == inner
    assert "additionalProperties" not in schema  # the caller's own


def test_log_probabilities(served: Caller) -> None:
    asked = {"logprobs": True, "top_logprobs": 2, "options": OPTIONS}
    body = {**CHAT, "max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    wanted = served.post("/v1/chat/completions", body).json["choices"][0]["logprobs"]["content"]
    assert served.post("/api/chat", {**CHAT, **asked, "stream": False}).json["logprobs"] == wanted
    found = [one for line in lines(served.post("/api/chat", {**CHAT, **asked})) for one in line.get("logprobs", [])]
    assert found == wanted
    raw = served.post("/api/generate", {"model": "demo", "prompt": "Hi", "raw": True, **asked, "stream": False}).json
    assert len(raw["logprobs"]) == 12
    assert "logprobs" not in served.post("/api/chat", {**CHAT, "options": OPTIONS, "stream": False}).json
    assert served.post("/api/chat", {**CHAT, "top_logprobs": 2}).status == 400


@pytest.mark.parametrize(
    ("fields", "status", "named"),
    [
        ({"options": {"num_ctx": "all"}}, 400, "num_ctx"),
        ({"options": {"mirostat": 1}}, 400, "mirostat"),
        ({"options": {"temperature": "hot"}}, 400, "temperature"),
        ({"format": "xml"}, 400, "format"),
        ({"messages": [{"role": "user", "content": "x", "images": ["a"]}]}, 400, "image"),
        ({"model": "nobody"}, 404, "nobody"),
    ],
)
def test_what_is_not_supported_is_named_in_a_text_as_ollamas_clients_expect(
    served: Caller, fields: dict[str, Any], status: int, named: str
) -> None:
    answer = served.post("/api/chat", {**CHAT, **fields})
    assert answer.status == status
    assert isinstance(answer.json["error"], str)
    assert named in answer.json["error"]


def test_what_programs_ask_first(served: Caller) -> None:
    assert [one["name"] for one in served.get("/api/tags").json["models"]] == ["demo:latest", "other/name:latest"]
    (card, _) = served.get("/api/tags").json["models"]
    assert card["size"] == resolve_model(None).stat().st_size
    details = {"format": "gguf", "family": "llama", "parameter_size": "134.52M", "quantization_level": "Q4_1"}
    assert card["details"].items() >= {**details, "families": ["llama"]}.items()
    assert served.get("/api/ps").json["models"][0].items() >= {**card, "context_length": 4096}.items()
    version = tuple(map(int, served.get("/api/version").json["version"].split(".")))
    assert version >= (0, 13, 4)  # below it Codex refuses; below 0.6.4 VS Code and Raycast
    shown = served.post("/api/show", {"model": "demo"}).json
    assert shown["model_info"]["general.context_length"] == 4096
    assert shown["model_info"][f"{shown['model_info']['general.architecture']}.context_length"] == 4096
    assert shown["details"] == card["details"]
    assert shown["model_info"]["general.parameter_count"] == 134_515_008
    assert shown["modified_at"].endswith("Z")
    assert isinstance(shown["parameters"], str)
    assert shown["capabilities"] == ["completion", "tools", "embedding"]  # of the fake executor
    assert served.post("/api/pull", {"model": "x"}).status == 501
    pulled = served.post("/api/pull", {"model": "other/name"})  # as Codex does if the name that it uses has no tag
    assert (pulled.status, pulled.json) == (200, {"status": "success"})
    assert served.call("DELETE", "/api/delete").status == 501


#: Options as programs for Ollama send them all, with a context that is larger than this server's.
DOCUMENTED = {
    "num_keep": 5,
    "seed": 42,
    "num_predict": 4,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.0,
    "typical_p": 0.7,
    "repeat_last_n": 33,
    "temperature": 0.8,
    "repeat_penalty": 1.2,
    "presence_penalty": 1.5,
    "penalize_newline": True,
    "frequency_penalty": 1.0,
    "stop": ["\n", "user:"],
    "numa": False,
    "num_ctx": 32768,
    "num_batch": 2,
    "num_gpu": 1,
    "main_gpu": 0,
    "use_mmap": True,
    "num_thread": 8,
}


@pytest.mark.parametrize(
    "options",
    [
        DOCUMENTED,
        {"mirostat": 0, "mirostat_eta": 0.1, "mirostat_tau": 5.0},
        {"tfs_z": 1.0, "num_gqa": 8, "draft_num_predict": 2},
        {"num_predict": 4.0, "seed": 7.0, "top_k": 5.0},
        dict.fromkeys([*DOCUMENTED, "mirostat", "tfs_z"]),
    ],
)
def test_options_that_ollama_takes(served: Caller, options: dict[str, Any]) -> None:
    body = {**CHAT, "stream": False, "options": {**options, "num_predict": 4}}
    answer = served.post("/api/chat", body)
    assert answer.status == 200, answer.body


@pytest.mark.parametrize(("name", "value"), [("tfs_z", 0.9), ("mirostat", 2)])
def test_samplers_that_are_not_here_are_refused_by_name(served: Caller, name: str, value: float) -> None:
    answer = served.post("/api/chat", {**CHAT, "stream": False, "options": {name: value}})
    assert (answer.status, f"option {name} is not supported" in answer.json["error"]) == (400, True)


def test_what_has_no_effect_is_told() -> None:
    noted: list[str] = []
    body = OllamaBody(model="demo", options={"num_ctx": 5000, "mirostat_eta": 0.1, "num_gqa": 8, "num_thread": 2})
    assert sampling_fields(body, 4096, noted.append) == {"stream": True}
    assert [one.split(",")[0] for one in noted] == [
        "num_ctx above this server's context of 4096 tokens",
        "the option mirostat_eta",
        "the option 'num_gqa'",
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_durations_add_up_and_none_is_zero(served: Caller, path: str, stream: bool) -> None:
    asked = CHAT if path == "/api/chat" else {"model": "demo", "prompt": "Hi"}
    end = lines(served.post(path, {**asked, "stream": stream, "options": {**OPTIONS, "num_predict": 40}}))[-1]
    load, prompt, answer = (end[f"{name}_duration"] for name in ("load", "prompt_eval", "eval"))
    assert min(load, prompt, answer) > 1  # 40 steps of the engine lie between the first token and the last
    assert abs(end["total_duration"] - load - prompt - answer) <= 4


@pytest.mark.parametrize("raw", [False, True])
def test_a_conversation_by_context(served: Caller, llm: LLM, raw: bool) -> None:
    ask = {"model": "demo", "prompt": "Hi", "raw": raw, "options": OPTIONS}
    first = served.post("/api/generate", {**ask, "stream": False}).json
    streamed = lines(served.post("/api/generate", ask))
    assert [one.get("context") for one in streamed] == [None] * (len(streamed) - 1) + [first["context"]]
    assert len(first["context"]) == first["prompt_eval_count"] + first["eval_count"]
    second = served.post("/api/generate", {**ask, "stream": False, "context": first["context"]}).json
    own = second["context"][len(first["context"]) : second["prompt_eval_count"]]
    assert second["context"][: len(first["context"])] == first["context"]
    prompt = {"prompt_token_ids": [*first["context"], *own]}
    wanted = llm.generate(prompt, SamplingParams(max_tokens=12, temperature=0), use_tqdm=False)[0]
    assert second["response"] == wanted.outputs[0].text
    assert "Hi" in llm.get_tokenizer().decode(own)


def test_a_context_that_is_none(served: Caller) -> None:
    for context in ("x", [-1], [10**9]):
        answer = served.post("/api/generate", {"model": "demo", "prompt": "Hi", "context": context})
        assert answer.status == 400, answer.body


@pytest.mark.parametrize(
    ("path", "body", "empty"),
    [
        ("/api/generate", {"keep_alive": "5m"}, {"response": ""}),
        ("/api/generate", {"prompt": "", "stream": False}, {"response": ""}),
        ("/api/chat", {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
        ("/api/chat", {"keep_alive": 0}, {"message": {"role": "assistant", "content": ""}}),
    ],
)
def test_a_request_without_a_prompt_asks_for_the_model_to_be_loaded_which_it_is(
    served: Caller, path: str, body: dict[str, Any], empty: dict[str, Any]
) -> None:
    (answer,) = lines(served.post(path, {"model": "demo", **body}))
    assert answer.pop("created_at").endswith("Z")
    assert answer == {"model": "demo", **empty, "done": True, "done_reason": "load"}


def test_images_beside_a_text_become_parts_before_it() -> None:
    message = {"role": "user", "content": "What?", "images": ["aGk=", "eW91"]}
    first, second = (
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}} for data in ("aGk=", "eW91")
    )
    assert with_parts(message) == {"role": "user", "content": [first, second, {"type": "text", "text": "What?"}]}
    assert with_parts({"role": "user", "content": "What?", "images": []}) == {
        "role": "user",
        "content": "What?",
        "images": [],
    }
    assert message["images"]
