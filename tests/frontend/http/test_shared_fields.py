"""A field that one route of chats obeys is obeyed on all; what peers publish is obeyed or refused by name."""

from typing import Any

import pytest

from frontend.http.anthropic.messages_bodies import MessagesBody
from frontend.http.anthropic.messages_bodies import chat_of as chat_of_messages
from frontend.http.bodies import ChatBody, ChatFields, CompletionBody
from frontend.http.openai.embeddings import EmbeddingBody
from frontend.http.openai.responses_bodies import ResponsesBody
from frontend.http.openai.responses_bodies import chat_of as chat_of_responses
from frontend.http.openai.scores import RerankBody, ScoreBody
from tests.frontend.http.caller import Caller
from tests.frontend.http.llama_cpp.test_llama_cpp import DEFAULTS as LLAMA_CPP_DEFAULTS

HI = [{"role": "user", "content": "Hi"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "Hi", "max_output_tokens": 12},
    "/v1/messages": {"messages": HI, "max_tokens": 12, "thinking": {"type": "enabled"}},
}


def text_of(answer: Any) -> str:
    """The text of an answer of either API."""
    (item,) = answer["content"] if "content" in answer else answer["output"][0]["content"]
    return str(item["text"])


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 7, "temperature": 1.0},
        {"temperature": 0, "logit_bias": {"42": 100}},
        {"temperature": 0, "allowed_token_ids": [42, 43]},
        {"seed": 7, "temperature": 1.0, "top_k": 2, "min_p": 0.1, "presence_penalty": 1.5, "repeat_penalty": 1.5},
        {"temperature": 0, "structured_outputs": {"choice": ["yes", "no"]}},
        {"temperature": 0, "stop": ["e"], "include_stop_str_in_output": True},
        {"temperature": 0, "stop_token_ids": [42], "logit_bias": {"42": 100}},
        {"temperature": 0, "chat_template_kwargs": {"enable_thinking": False}, "priority": 3, "cache_salt": "x"},
        {"temperature": 0, "ignore_eos": True, "skip_special_tokens": False, "min_tokens": 3},
        {"use_beam_search": True, "best_of": 2},
    ],
    ids=lambda fields: "+".join(fields),
)
def test_the_answer_is_that_of_chats(served: Caller, path: str, fields: dict[str, Any]) -> None:
    chat = served.post("/v1/chat/completions", {"messages": HI, "max_tokens": 12, **fields}).json
    wanted = chat["choices"][0]["message"]["content"]
    answer = served.post(path, {"model": "demo", **ROUTES[path], **fields})
    assert answer.status == 200, answer.body
    shown = text_of(answer.json) if wanted else ""
    assert shown == wanted


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("prompt_logprobs", 1),
        ("return_token_ids", True),
        ("logprob_token_ids", [42]),
        ("mirostat", 2),
        ("echo", True),
        ("guided_json", {}),
        ("truncation_side", "right"),
        ("include_reasoning", False),
        ("chat_template", "{{ messages }}"),
    ],
)
def test_what_such_an_answer_cannot_show_is_refused_by_name(served: Caller, path: str, name: str, value: Any) -> None:
    answer = served.post(path, {"model": "demo", **ROUTES[path], name: value})
    assert answer.status == 400, answer.body
    assert name in answer.json["error"]["message"]


def test_every_field_of_chats_reaches_the_chat_from_every_api() -> None:
    """Each with a mark in its place: a new field of ChatFields cannot be forgotten."""
    marks: dict[str, Any] = {name: f"mark {name}" for name in ChatFields.__struct_fields__}
    marks |= {"n": 1, "prompt_logprobs": None, "return_token_ids": False, "return_tokens_as_token_ids": False}
    chats: list[ChatBody] = [
        chat_of_responses(ResponsesBody(**{**marks, "input": "Hi"}), print),
        chat_of_messages(MessagesBody(**{**marks, "messages": HI, "chat_template_kwargs": {"x": 1}}), print),
    ]
    for chat in chats:
        found = {name: getattr(chat, name) for name in marks if name != "chat_template_kwargs"}
        assert found == {name: value for name, value in marks.items() if name != "chat_template_kwargs"}
    assert chats[1].chat_template_kwargs == {"enable_thinking": False, "x": 1}


#: Fields of vLLM's requests. Chats and completions: its protocol files at commit 002032ee; responses: 010a69ce;
#: messages: 00589e56; each with the further fields that 0.33 was seen to take. Embeddings, scores: a part of theirs.
_VLLM_SAMPLING = """use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words"""
_VLLM_COMMON = """model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed stop
    stream stream_options temperature top_p user structured_outputs priority request_id session_id
    return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets return_mm_kwargs
    cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection thinking_token_budget
    stream_interval add_special_tokens"""
_VLLM_POOLING = "model priority truncate_prompt_tokens truncation_side use_activation"
VLLM: dict[type[Any], str] = {
    CompletionBody: f"{_VLLM_SAMPLING} {_VLLM_COMMON} prompt echo suffix prompt_embeds",
    ChatBody: f"""{_VLLM_SAMPLING} {_VLLM_COMMON} messages top_logprobs max_completion_tokens tools tool_choice
        reasoning_effort include_reasoning parallel_tool_calls echo add_generation_prompt continue_final_message
        documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text""",
    ResponsesBody: """background include input instructions max_output_tokens max_tool_calls metadata model logit_bias
        parallel_tool_calls previous_response_id prompt reasoning service_tier store stream temperature text tool_choice
        tools top_logprobs top_p top_k truncation user skip_special_tokens include_stop_str_in_output prompt_cache_key
        request_id mm_processor_kwargs priority cache_salt enable_response_messages previous_input_messages
        previous_response structured_outputs repetition_penalty seed stop ignore_eos vllm_xargs stop_token_ids
        chat_template_kwargs min_p presence_penalty frequency_penalty""",
    EmbeddingBody: f"""{_VLLM_POOLING} input encoding_format dimensions messages embed_dtype endianness""",
    ScoreBody: f"{_VLLM_POOLING} text_1 text_2",
    RerankBody: f"{_VLLM_POOLING} query documents top_n",
    MessagesBody: """model messages max_tokens metadata output_config stop_sequences stream system temperature
        tool_choice tools top_k top_p kv_transfer_params chat_template_kwargs cache_salt""",
}
#: Fields of llama.cpp's own completions, by its README; its routes of chats and completions take them too.
LLAMA_CPP = " ".join({*LLAMA_CPP_DEFAULTS} - {"prompt"})
#: Some of SGLang's.
SGLANG = "regex ebnf max_new_tokens min_new_tokens"
#: Field -> why it may be ignored.
INERT = {
    "return_token_offsets": "vLLM reads it on /render only, which is not here",
    "return_mm_kwargs": "vLLM reads it on /render only, which is not here",
    "n_cmpl": "llama.cpp reads it on /completion; chats and completions have n",
}


@pytest.mark.parametrize("kind", VLLM, ids=lambda kind: kind.__name__)
def test_what_peers_publish_is_known(kind: type[Any]) -> None:
    """The body has each field, or the list says why not. What a field of the body does is held by the tests above."""
    more = "" if kind in (MessagesBody, EmbeddingBody, ScoreBody, RerankBody) else f"{LLAMA_CPP} {SGLANG}"
    unknown = {*VLLM[kind].split(), *more.split()} - {*kind.__struct_fields__}
    assert unknown <= INERT.keys()


def test_llama_cpps_defaults_are_taken_by_chats_and_completions(served: Caller) -> None:
    fields = {name: value for name, value in LLAMA_CPP_DEFAULTS.items() if name not in ("n_predict", "logit_bias")}
    del fields["samplers"], fields["prompt"]
    for answer in (served.chat(**fields, n_predict=2), served.complete("Hi", **fields, n_predict=2)):
        assert answer.status == 200, answer.body
        assert answer.json["usage"]["completion_tokens"] == 2
