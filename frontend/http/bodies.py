"""The bodies of requests, as types: fields that are used, accepted without effect, or refused by name.

An unknown field is ignored and counted: clients send new ones every month.
"""

import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from frontend.http.errors import HttpError
from ipc.params.sampling_params import NUMBERS

Json = dict[str, Any]


class StreamOptions(msgspec.Struct):
    """What a stream reports in addition to its tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


if TYPE_CHECKING:
    from msgspec import Struct as NumberFields
else:
    #: Every number of SamplingParams under all of its names; None = not given.
    NumberFields = msgspec.defstruct(
        "NumberFields",
        [(name, one.kind | None, None) for one in NUMBERS.values() for name in (one.name, *one.parameter.names)],
        kw_only=True,
    )


class ParameterFields(NumberFields, kw_only=True):
    """Fields with the names and meanings of SamplingParams; None = not given. The numbers are generated from
    SamplingParams.
    """

    max_tokens: int | None = None  # one of the numbers; routes change it
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    use_beam_search: bool | None = None
    best_of: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None


class SamplingFields(ParameterFields, kw_only=True):
    """Fields of every body that asks for tokens."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Any = None
    structured_outputs: Any = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    receipt: bool | None = None  # docs/receipts.md
    prompt_cache_key: str | None = None  # see frontend/http/pins.py
    prompt_cache_retention: str | None = None

    # Accepted, but without effect on the answer.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    request_id: Any = None
    session_id: Any = None
    stream_interval: Any = None  # tokens of a chunk; here each step's tokens are one chunk

    # The same, of llama.cpp: there are no slots, no prompt is cut, and the rest belongs to what is refused below.
    id_slot: Any = None
    n_keep: Any = None
    n_discard: Any = None
    n_cache_reuse: Any = None
    sse_ping_interval: Any = None
    dynatemp_exponent: Any = None
    dry_base: Any = None
    dry_allowed_length: Any = None
    dry_penalty_last_n: Any = None
    dry_sequence_breakers: Any = None
    mirostat_tau: Any = None
    mirostat_eta: Any = None
    adaptive_decay: Any = None

    # Refused by name.
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    structural_tag: Any = None
    grammar: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    prompt_embeds: Any = None
    beam_width: Any = None
    lora_request: Any = None
    logits_processors: Any = None
    thinking_token_budget: Any = None
    logprob_token_ids: Any = None
    spaces_between_special_tokens: Any = None
    watermarking: Any = None
    ec_transfer_params: Any = None
    vllm_xargs: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None
    repetition_detection: Any = None
    return_prompt_text: Any = None
    routed_experts_prompt_start: Any = None
    kv_transfer_params: Any = None
    truncation_side: Any = None
    mirostat: Any = None
    tfs_z: Any = None
    dynatemp_range: Any = None
    dry_multiplier: Any = None
    adaptive_target: Any = None
    min_keep: Any = None
    n_indent: Any = None
    n_probs: Any = None
    samplers: Any = None
    t_max_predict_ms: Any = None
    post_sampling_probs: Any = None
    return_progress: Any = None
    return_tokens: Any = None
    timings_per_token: Any = None
    cache_prompt: Any = None
    lora: Any = None
    response_fields: Any = None
    max_new_tokens: Any = None
    min_new_tokens: Any = None


class CompletionBody(SamplingFields, kw_only=True):
    """The body of /v1/completions."""

    prompt: str | list[int | str | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    prompt_embeds: str | list[str] | None = None  # see frontend/http/openai/prompt_embeds.py; refused unless enabled
    suffix: Any = None


class ChatFields(SamplingFields, kw_only=True):
    """Fields of every body that asks for a chat, in any API: shared_fields() converts them to a ChatBody's."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    documents: list[Json] | None = None

    # Refused by name.
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    echo: Any = None
    include_reasoning: Any = None
    add_special_tokens: Any = None


class ChatBody(ChatFields, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[Json]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """The body of /tokenize: a prompt, or a chat. content, add_special, parse_special and
    with_pieces are llama.cpp's."""

    model: str | None = None
    content: str | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None
    parse_special: bool | None = None
    prompt: str | None = None
    messages: list[Json] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Json | None = None
    tools: list[Json] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[int]


_GRAMMAR = "use response_format or structured_outputs"
#: Field -> (values without effect, what to do instead). None is always such a value.
_REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "guided_json": ((), _GRAMMAR),
    "guided_regex": ((), _GRAMMAR),
    "guided_choice": ((), _GRAMMAR),
    "guided_grammar": ((), _GRAMMAR),
    "guided_decoding_backend": ((), _GRAMMAR),
    "guided_whitespace_pattern": ((), _GRAMMAR),
    "structural_tag": ((), _GRAMMAR),
    "grammar": (("",), _GRAMMAR),  # llama.cpp's
    "json_schema": (({},), _GRAMMAR),
    "regex": ((), _GRAMMAR),  # SGLang's
    "ebnf": ((), _GRAMMAR),
    "prompt_embeds": ((), "send text or token ids"),
    "beam_width": ((), "best_of is the number of beams of use_beam_search; the n best are returned"),
    "lora_request": ((), "name the adapter as the model"),
    "logits_processors": (([],), "use logit_bias, allowed_token_ids or bad_words"),
    "thinking_token_budget": ((), "use max_tokens"),
    "logprob_token_ids": (([],), "ask for the most likely tokens with logprobs"),
    "kv_transfer_params": (({},), "the engine's owner connects caches with --kv-listen and --kv-peers"),
    "spaces_between_special_tokens": ((True,), "the text always has its tokens' spaces"),
    "watermarking": ((False,), "texts are not marked"),
    "ec_transfer_params": (({},), "images are encoded when they are used"),
    "vllm_xargs": (({},), "no extension reads them"),
    "mm_processor_kwargs": (({},), "images are processed as the model's files say"),
    "media_io_kwargs": (({},), "images are processed as the model's files say"),
    "return_prompt_text": ((False,), "use return_token_ids and /detokenize"),
    "routed_experts_prompt_start": ((0,), "routing is not shown"),
    "truncation_side": (("left",), "truncate_prompt_tokens keeps the tokens at the prompt's end"),
    "mirostat": ((0,), "use top_p, top_k or min_p"),
    "tfs_z": ((1, 1.0), "llama.cpp removed it too; use typical_p, top_p or min_p"),
    "dynatemp_range": ((0, 0.0), "use temperature"),
    "dry_multiplier": ((0, 0.0), "use repeat_penalty or frequency_penalty"),
    "adaptive_target": ((-1, -1.0), "use typical_p or top_p"),
    "min_keep": ((0, 1), "each filter keeps one token at least"),
    "n_indent": ((0,), "use response_format or structured_outputs"),
    "n_probs": ((0,), "use logprobs"),
    "samplers": ((), "/completion takes it"),
    "t_max_predict_ms": ((0,), "use the header x-deadline-ms, or max_tokens"),
    "post_sampling_probs": ((False,), "logprobs are what the engine's logprobs_mode selects"),
    "return_progress": ((False,), "the first tokens come when the prompt is read"),
    "return_tokens": ((False,), "use return_token_ids"),
    "timings_per_token": ((False,), "/completion takes it"),
    "cache_prompt": ((True,), "use a cache_salt of your own"),
    "lora": (([],), "name the adapter as the model"),
    "response_fields": (([],), "/completion takes it"),
    "max_new_tokens": ((), "use max_tokens"),
    "min_new_tokens": ((), "use min_tokens"),
    "repetition_detection": ((), "use repetition_penalty or stop"),
    "suffix": (("",), "write the prompt in the model's own fill-in-the-middle form, if it has one"),
}


#: The same for chats only: completions support echo, and other special tokens.
_REFUSED_IN_CHATS: dict[str, tuple[tuple[object, ...], str]] = {
    "echo": ((False,), "send the text to /v1/completions"),
    "include_reasoning": ((True,), "read content alone"),
    "add_special_tokens": ((False,), "a chat template writes its special tokens itself"),
    "functions": (([],), "use tools"),
    "function_call": (("none",), "use tool_choice"),
    "modalities": ((["text"], []), "this server answers with text"),
    "audio": ((), "this server answers with text"),
}
#: Field -> neutral values, on routes whose answers have one choice and cannot show the field's effect.
_UNSHOWN: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}


def shared_fields(body: ChatFields) -> Json:
    """Return the fields that a body of another API shares with ChatBody.

    Errors: HttpError 400 that names a field whose effect that API's answers cannot show.
    """
    for name, neutral in _UNSHOWN.items():
        if (value := getattr(body, name)) is not None and value not in neutral:
            raise HttpError(400, f"{name} is not supported here: use /v1/chat/completions", param=name)
    return {name: getattr(body, name) for name in ChatFields.__struct_fields__}


@functools.cache
def refused_fields(kind: type[msgspec.Struct]) -> dict[str, tuple[tuple[object, ...], str]]:
    """Return the fields of a body that are refused by name, with the values that are not, and what to do instead."""
    found = _REFUSED | (_REFUSED_IN_CHATS if issubclass(kind, ChatFields) else {})
    return {name: found[name] for name in kind.__struct_fields__ if name in found}


@functools.cache
def _refused_of(
    kind: type[msgspec.Struct],
) -> tuple[dict[str, tuple[tuple[object, ...], str]], Callable[[msgspec.Struct], tuple[Any, ...]]]:
    """Return refused_fields(), and a function that reads all of them: there are dozens, read for each request."""
    refused = refused_fields(kind)
    return refused, operator.attrgetter(*refused)


def refuse_fields(body: msgspec.Struct) -> None:
    """Check that known but unsupported fields have neutral values. Errors: HttpError 400."""
    refused, read = _refused_of(type(body))
    values = read(body)
    if values.count(None) == len(values):  # as nearly always
        return
    for (name, (neutral, instead)), value in zip(refused.items(), values, strict=True):
        if value is not None and not any(type(value) is type(one) and value == one for one in neutral):
            raise HttpError(400, f"{name} is not supported: {instead}", param=name)
