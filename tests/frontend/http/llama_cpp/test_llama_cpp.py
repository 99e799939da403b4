"""llama.cpp's own routes: the same answers in its form, and each field obeyed or refused."""

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from frontend.http.bodies import ChatBody
from frontend.http.errors import HttpError
from frontend.http.llama_cpp.llama_cpp_bodies import InfillBody, LlamaCppBody, completion_of, infill_prompt
from frontend.http.sampling import read_sampling
from frontend.llm import LLM
from ipc.params.sampling_params import SamplingParams
from ipc.params.structured_outputs import StructuredOutputsParams
from tests.frontend.http.caller import Answer, Caller

GREEDY: dict[str, Any] = {"n_predict": 8, "temperature": 0}
PROMPT = "Why is the sky blue?"


def events_of(answer: Answer) -> list[Any]:
    lines = [one for one in answer.body.decode().split("\n\n") if one]
    return [json.loads(one.removeprefix("data: ")) for one in lines]


def complete(served: Caller, prompt: Any = PROMPT, **fields: Any) -> Any:
    answer = served.post("/completion", {"prompt": prompt, **GREEDY, **fields})
    assert answer.status == 200, answer.body
    return answer.json


def test_a_whole_answer(served: Caller, llm: LLM) -> None:
    wanted = llm.generate(PROMPT, SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)[0]
    found = complete(served, return_tokens=True)
    assert (found["content"], found["tokens"]) == (wanted.outputs[0].text, wanted.outputs[0].token_ids)
    assert (found["stop"], found["stop_type"], found["stopping_word"], found["truncated"]) == (True, "limit", "", False)
    assert (found["tokens_predicted"], found["tokens_evaluated"]) == (8, len(wanted.prompt_token_ids))
    assert (found["prompt"], found["model"], found["index"]) == (PROMPT, "demo", 0)
    assert found["has_new_line"] == ("\n" in found["content"])
    settings = found["generation_settings"]
    assert (settings["n_predict"], settings["temperature"], settings["n_ctx"]) == (8, 0, 4096)
    timings = found["timings"]
    assert timings["predicted_n"] == 8
    assert timings["prompt_n"] + timings["cache_n"] == found["tokens_evaluated"]
    assert min(timings["prompt_ms"], timings["predicted_ms"], timings["predicted_per_second"]) > 0
    assert complete(served)["tokens"] == []
    assert served.post("/completions", {"prompt": PROMPT, **GREEDY}).json["content"] == found["content"]


def test_a_stream_ends_with_what_is_said_of_the_whole(served: Caller) -> None:
    whole = complete(served)
    answer = served.post("/completion", {"prompt": PROMPT, **GREEDY, "stream": True, "timings_per_token": True})
    *parts, end = events_of(answer)
    assert "".join(one["content"] for one in parts) == whole["content"]
    assert [one["stop"] for one in parts] == [False] * len(parts)
    assert [one["tokens_predicted"] for one in parts][-1] == 8
    assert all(one["timings"]["predicted_n"] == one["tokens_predicted"] for one in parts)
    assert (end["stop"], end["content"], end["tokens"], end["stop_type"]) == (True, "", [], "limit")
    assert end["generation_settings"]["stream"] is True
    assert end["tokens_evaluated"] == whole["tokens_evaluated"]


def test_forms_of_a_prompt(served: Caller, llm: LLM) -> None:
    encode = llm.get_tokenizer().encode
    first = complete(served)["content"]
    assert complete(served, encode(PROMPT))["content"] == first
    assert complete(served, ["Why is", *encode(" the sky", add_special_tokens=False), " blue?"])["content"] == first
    assert complete(served, {"prompt_string": PROMPT})["content"] == first
    many = complete(served, [PROMPT, encode("Hi"), {"prompt_string": PROMPT}], n_cmpl=2, temperature=1, seed=3)
    assert [one["index"] for one in many] == list(range(6))
    assert [one["tokens_evaluated"] for one in many[::2]] == [
        len(encode(PROMPT)),
        len(encode("Hi")),
        len(encode(PROMPT)),
    ]


def test_stop_words_and_no_tokens(served: Caller) -> None:
    text = complete(served)["content"]
    word = text[3:6]
    found = complete(served, stop=[word])
    assert (found["stop_type"], found["stopping_word"]) == ("word", word)
    assert found["content"] == text[: text.index(word)]
    empty = complete(served, n_predict=0)
    assert (empty["content"], empty["tokens_predicted"], empty["stop_type"]) == ("", 0, "limit")
    (end,) = events_of(served.post("/completion", {"prompt": PROMPT, "n_predict": 0, "stream": True}))
    assert (end["stop"], end["tokens_predicted"]) == (True, 0)


def test_probabilities_and_chosen_fields(served: Caller) -> None:
    found = complete(served, n_probs=2)["completion_probabilities"]
    assert len(found) == 8
    assert {*found[0]} == {"id", "token", "logprob", "bytes", "top_logprobs"}
    assert found[0]["top_logprobs"][0]["id"] == found[0]["id"]
    assert len(found[0]["top_logprobs"]) == 2
    chosen = complete(served, response_fields=["content", "generation_settings/n_predict", "a/b"])
    assert {*chosen} == {"content", "generation_settings/n_predict"}


def test_a_schema_and_a_grammar_are_obeyed(served: Caller) -> None:
    assert complete(served, grammar='root ::= "yes" | "no"', n_predict=20)["content"] in ("yes", "no")
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    assert json.loads(complete(served, json_schema=schema, n_predict=40)["content"]) == {"a": 1}
    assert params_of(json_schema={}).structured_outputs == StructuredOutputsParams(json={})
    assert complete(served, json_schema={}, seed=1, temperature=1)["content"][:1] in tuple('{["tfn-0123456789 \n\t')


def test_the_cache_is_left_alone_if_asked(served: Caller) -> None:
    prompt = list(range(100, 200))
    complete(served, prompt)
    assert complete(served, prompt)["tokens_cached"] > 0
    assert complete(served, prompt, cache_prompt=False)["tokens_cached"] == 0


def params_of(**fields: Any) -> SamplingParams:
    """The engine's parameters of these fields."""
    body = msgspec.json.decode(msgspec.json.encode({"prompt": "x", **fields}), type=LlamaCppBody)
    tokenizer: Any = SimpleNamespace(encode=lambda text, add_special_tokens: [len(text)])
    defaults = {"top_k": 9, "repetition_penalty": 1.5}
    return read_sampling(completion_of(body, tokenizer)[0], defaults, max_tokens=None, logprobs=None)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"n_predict": -1}, {"max_tokens": None}),
        ({"n_predict": 5, "typical_p": 0.5, "top_n_sigma": 2}, {"max_tokens": 5, "typical_p": 0.5, "top_n_sigma": 2.0}),
        ({"repeat_last_n": 0, "repeat_penalty": 2}, {"repetition_penalty": 2.0, "repeat_last_n": 0}),
        ({"repeat_last_n": -1, "repeat_penalty": 2}, {"repetition_penalty": 2.0}),
        ({"repeat_last_n": 64, "repeat_penalty": 1.5}, {"repetition_penalty": 1.5, "repeat_last_n": 64}),
        ({"logit_bias": [[7, 1.5], ["word", -2], [9, False]]}, {"logit_bias": {7: 1.5, 4: -2.0, 9: -100.0}}),
        ({"logit_bias": {"7": 1}}, {"logit_bias": {7: 1.0}}),
        ({"samplers": ["top_k", "temperature"], "top_p": 0.5, "top_k": 3}, {"top_p": 1.0, "top_k": 3}),
        ({"samplers": ["typical-p", "top_p"], "typical_p": 0.5}, {"typical_p": 0.5, "top_k": 0, "temperature": 1.0}),
        ({"samplers": []}, {"repetition_penalty": 1.0}),
        ({"ignore_eos": True, "seed": -1}, {"ignore_eos": True, "seed": None}),
    ],
)
def test_fields_reach_the_engine(fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    params = params_of(**fields)
    assert {name: getattr(params, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mirostat", 2),
        ("tfs_z", 0.5),
        ("dynatemp_range", 0.3),
        ("dry_multiplier", 0.8),
        ("adaptive_target", 0.4),
        ("min_keep", 3),
        ("n_indent", 2),
        ("t_max_predict_ms", 100),
        ("post_sampling_probs", True),
        ("return_progress", True),
        ("samplers", ["temperature", "top_k"]),
        ("samplers", ["dry", "unknown"]),
        ("lora", [{"id": 0, "scale": 0.5}]),
        ("image_data", [{"data": ""}]),
        ("system_prompt", "Be brief."),
        ("grammar_lazy", True),
        ("json_schema", 5),
        ("return_token_ids", True),
        ("prompt_logprobs", 1),
        ("stream_options", {"include_usage": True}),
        ("guided_json", {}),
        ("logit_bias", [[1]]),
        ("logit_bias", [[1, "much"]]),
    ],
)
def test_what_is_not_here_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(HttpError, match=name if name != "logit_bias" else "bias"):
        params_of(**{name: value})


#: What llama.cpp's README documents as its options' defaults, which programs send.
DEFAULTS = {
    "temperature": 0.8,
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "n_predict": -1,
    "n_indent": 0,
    "n_keep": 0,
    "n_cache_reuse": 0,
    "stop": [],
    "typical_p": 1.0,
    "repeat_penalty": 1.0,
    "repeat_last_n": 64,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["\n", ":", '"', "*"],
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "grammar": "",
    "seed": -1,
    "ignore_eos": False,
    "logit_bias": [],
    "n_probs": 0,
    "min_keep": 0,
    "t_max_predict_ms": 0,
    "id_slot": -1,
    "cache_prompt": True,
    "return_tokens": False,
    "samplers": ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    "timings_per_token": False,
    "return_progress": False,
    "sse_ping_interval": -1,
    "post_sampling_probs": False,
    "response_fields": [],
    "lora": [],
    "adaptive_target": -1.0,
    "n_cmpl": 1,
    "json_schema": None,
    "stream": False,
    "prompt": "x",
}


def test_documented_fields_are_known_and_their_defaults_are_taken() -> None:
    assert DEFAULTS.keys() <= {*LlamaCppBody.__struct_fields__}
    assert params_of(**DEFAULTS).top_k == 40
    assert params_of(**dict.fromkeys(DEFAULTS)).top_k == 9


FIM = {"<|fim_prefix|>": 1001, "<|fim_suffix|>": 1002, "<|fim_middle|>": 1003}
REPOSITORY = {"<|repo_name|>": 1004, "<|file_sep|>": 1005}


def infilled(tokens: dict[str, int], bos: int | None = None, **fields: Any) -> str:
    """The prompt with its special tokens as names, of a tokenizer whose ids are characters."""
    tokenizer: Any = SimpleNamespace(hf=SimpleNamespace(token_to_id=tokens.get), bos_token_id=bos)

    def encode(text: str, special: bool) -> list[int]:
        return [*([bos] if special and bos else []), *map(ord, text)]

    names = {number: name for name, number in tokens.items()} | {1000: "<s>"}
    body = InfillBody(input_prefix="pre", input_suffix="suf", **fields)
    return "".join(names.get(one) or chr(one) for one in infill_prompt(body, tokenizer, encode))


def test_the_prompt_of_filling_in() -> None:
    plain = "<|fim_prefix|>pre<|fim_suffix|>suf<|fim_middle|>"
    assert infilled(FIM) == plain
    assert infilled(FIM, 1000, prompt="x") == "<s><|fim_prefix|>prex<|fim_suffix|>suf<|fim_middle|>"
    extra = [{"filename": "a.py", "text": "a"}, {"text": "b"}]
    assert infilled(FIM, input_extra=extra) == f"\n\n--- snippet ---\n\na\n\n--- snippet ---\n\nb{plain}"
    files = "<|repo_name|>myproject\n<|file_sep|>a.py\na<|file_sep|>tmp\nb<|file_sep|>filename\n"
    assert infilled(FIM | REPOSITORY, input_extra=extra) == files + plain
    with pytest.raises(HttpError, match="input_extra"):
        infilled(FIM, input_extra=[{"text": 5}])


def test_a_model_without_tokens_for_it_fills_nothing_in(served: Caller) -> None:
    answer = served.post("/infill", {"input_prefix": "a", "input_suffix": "b"})
    assert (answer.status, "/infill is not supported" in answer.json["error"]["message"]) == (501, True)
    assert served.post("/infill", {"input_suffix": "b"}).status == 400


def test_what_programs_ask_of_the_server(served: Caller, llm: LLM) -> None:
    props = served.get("/props").json
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert props["default_generation_settings"]["params"]["n_predict"] == -1
    assert (props["total_slots"], props["model_alias"]) == (64, "demo")
    assert props["chat_template"] == llm.get_tokenizer().chat_template
    assert served.post("/props", {}).status == 501
    slots = served.get("/slots?fail_on_no_slot=1").json
    assert [one["id"] for one in slots] == list(range(64))
    assert {one["is_processing"] for one in slots} == {False}
    messages = [{"role": "user", "content": "Hi"}]
    prompt = served.post("/apply-template", {"messages": messages}).json["prompt"]
    assert prompt == llm.get_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert served.post("/completion", {"prompt": prompt, **GREEDY}).json["content"]
    assert ChatBody(messages=messages).messages == messages


def test_pieces_of_tokens(served: Caller) -> None:
    found = served.post("/tokenize", {"content": "sky \u00e1 \U0001f9ff", "with_pieces": True}).json["tokens"]
    data = [one["piece"].encode() if isinstance(one["piece"], str) else bytes(one["piece"]) for one in found]
    assert b"".join(data).decode() == "sky \u00e1 \U0001f9ff"
    assert any(isinstance(one["piece"], list) for one in found)
    assert [one["id"] for one in found] == served.post("/tokenize", {"content": "sky \u00e1 \U0001f9ff"}).json["tokens"]
    assert served.post("/tokenize", {"content": "plain", "parse_special": False}).status == 200
    special = served.post("/tokenize", {"content": "<|im_start|>", "parse_special": False})
    assert (special.status, "parse_special" in special.json["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "prompt is missing"),
        ({"prompt": 5}, "a prompt is a text"),
        ({"prompt": [5, True, None]}, "token ids must be ints"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": ["a"]}}, "multimodal_data"),
        ({"prompt": ["a", "b"], "stream": True}, "several prompts cannot be streamed"),
        ({"prompt": "a", "grammar": 'root ::= "a"', "json_schema": {}}, "exclude each other"),
        ({"prompt": "x", "model": "other"}, "not served"),
    ],
)
def test_wrong_bodies(served: Caller, body: dict[str, Any], named: str) -> None:
    answer = served.post("/completion", body)
    assert answer.status in (400, 404)
    assert named in answer.json["error"]["message"]
