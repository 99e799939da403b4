"""Pooling requests: prompts and parameters become requests for vectors, and pairs of texts become prompts."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from frontend.call_arguments import read_deadline, read_priorities, wrong_number
from frontend.images.chat_images import has_images
from frontend.lora import LoRAInput
from frontend.results.pooling_state import PoolingState
from frontend.session import EngineHandle, Message
from frontend.text.chat_template import reads_pairs, render_chat
from frontend.text.prompt_forms import PromptInput
from frontend.text.prompts import Prompt, no_images, read_prompts, text_of
from frontend.text.tokenizer import Tokenizer
from ipc.errors import InvalidRequestError
from ipc.params.pooling_params import GENERATE, PoolingParams, PoolingTask, check_task
from ipc.wire.lora_messages import AdapterId

#: One side of a pair to score: a text, or {"content": [...]} with the parts of a message. And a pair.
ScoredSide = str | Mapping[str, Any]
ScoredPair = tuple[ScoredSide, ScoredSide]


class PreparedPooling(NamedTuple):
    """A checked pooling request, ready to be submitted."""

    prompt: Prompt
    params: PoolingParams
    priority: int = 0
    deadline: float | None = None  # monotonic seconds
    tenant: str = ""
    adapter: AdapterId | None = None


def prepare_pooling(
    engine: EngineHandle,
    prompts: Sequence[PromptInput],
    params: PoolingParams | Sequence[PoolingParams] | None,
    task: PoolingTask | None,
    *,
    priority: int | Sequence[int] | None = None,
    deadline: float | None = None,
    tenant: str = "",
    prompt_name: str | None = None,
    lora: LoRAInput = None,
    add_special_tokens: bool = True,
) -> list[PreparedPooling]:
    """Check and tokenize all prompts, before any is submitted; return one PreparedPooling each.

    task: None = the parameters' task, otherwise the engine's default. prompt_name: see TextPrompts.before(); for texts
    to embed. lora: the prompts' adapters, which the engine loads now. Errors: InvalidRequestError.
    """
    if not isinstance(tenant, str):
        raise InvalidRequestError(f"tenant must be a str, got {type(tenant).__name__}")
    end, welcome = read_deadline(deadline), engine.client.welcome
    chosen = _with_tasks(params, task, len(prompts), welcome.tasks)
    embeds = all((one.task or "").endswith("embed") for one in chosen)
    if prompt_name and not (embeds and engine.tokenizer is not None):
        raise InvalidRequestError("prompt_name is only for texts to embed")
    if embeds and engine.tokenizer is not None:
        prompts = engine.tokenizer.text_prompts.before(prompts, prompt_name)
    read = read_prompts(
        prompts,
        engine.tokenizer,
        vocab_size=welcome.vocab_size,
        max_model_len=welcome.limits.max_model_len,
        add_special_tokens=add_special_tokens,
        truncation=[one.truncate_prompt_tokens for one in chosen],
        num_output_tokens=0,
        keeps_beginnings=welcome.is_encoder,
        features=welcome.features,
        images=engine.images,
    )
    for prompt, one in zip(read, chosen, strict=True):
        check_task(one, welcome.tasks, len(prompt.token_ids))
    priorities = read_priorities(priority, len(read))
    adapters = engine.adapters.of_prompts(lora, len(read))
    return [
        PreparedPooling(prompt, one, urgency, end, tenant, adapter)
        for prompt, one, urgency, adapter in zip(read, chosen, priorities, adapters, strict=True)
    ]


def _with_tasks(
    params: PoolingParams | Sequence[PoolingParams] | None,
    task: PoolingTask | None,
    num_prompts: int,
    tasks: dict[str, int],
) -> list[PoolingParams]:
    """Return the parameters of each prompt, with its task. Errors: InvalidRequestError."""
    usual = next((name for name in tasks if name != GENERATE), "embed")
    many = [PoolingParams()] if params is None else list(params) if isinstance(params, Sequence) else [params]
    if not isinstance(params, Sequence):
        many *= num_prompts
    if len(many) != num_prompts:
        raise wrong_number("pooling_params", num_prompts, len(many))
    for one in many:
        if not isinstance(one, PoolingParams):
            raise InvalidRequestError(f"pooling_params must be PoolingParams, got {type(one).__name__}")
        if task is not None and one.task not in (None, task):
            raise InvalidRequestError(f"the parameters ask for the task {one.task!r}, but the call for {task!r}")
    chosen = [msgspec.structs.replace(one, task=task or one.task or usual) for one in many]
    for one in chosen:
        check_task(one, tasks, 1)  # before texts are read
    return chosen


def prepare_chats(
    engine: EngineHandle,
    conversations: Sequence[list[Message]],
    params: PoolingParams | Sequence[PoolingParams] | None,
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool | None = None,
    prompt_name: str | None = None,
    priority: int | Sequence[int] | None = None,
    deadline: float | None = None,
    tenant: str = "",
    lora: LoRAInput = None,
) -> list[PreparedPooling]:
    """Render the chats to embed, one vector each, perhaps with images, and prepare them as prepare_pooling() does.

    chat_template: as in LLM.chat(). add_generation_prompt: None = as the model's files say. prompt_name: name of the
    model's instruction that becomes the system message; None = its default, "" = none. Errors: InvalidRequestError;
    UnsupportedParameterError for images if the engine takes none.
    """
    if engine.images is None and any(map(has_images, conversations)):
        raise no_images("the chat")
    if engine.tokenizer is not None:
        prompts = engine.tokenizer.text_prompts
        conversations = [prompts.before_chat(one, prompt_name) for one in conversations]
        if add_generation_prompt is None:
            add_generation_prompt = prompts.opens_answer
    rendered = engine.render_chats(
        conversations,
        chat_template=chat_template,
        add_generation_prompt=bool(add_generation_prompt),
        tools=None,
        kwargs=None,
    )
    special = bool(rendered) and lacks_special_tokens(engine, rendered[0])
    return prepare_pooling(
        engine,
        rendered,
        params,
        "embed",
        priority=priority,
        deadline=deadline,
        tenant=tenant,
        prompt_name="",
        lora=lora,
        add_special_tokens=special,
    )


def lacks_special_tokens(engine: EngineHandle, prompt: PromptInput) -> bool:
    """Return whether a chat template has left the special tokens around a prompt to the tokenizer.

    As in transformers' processors, which are those of models with images. Templates of others write them all.
    """
    bos = None if engine.tokenizer is None else engine.tokenizer.bos_token
    return engine.images is not None and not (bos and text_of(prompt).startswith(bos))


def submit_pooling(engine: EngineHandle, prepared: PreparedPooling, request_id: str | None = None) -> PoolingState:
    """Submit a request; request_id None = its number. Errors: those of EngineClient.submit."""
    prompt, params, priority, deadline, tenant, adapter = prepared
    number = engine.client.submit(
        prompt.token_ids,
        params,
        seed=0,
        priority=priority,
        deadline_ms=0 if deadline is None else max(1, math.ceil((deadline - time.monotonic()) * 1000)),
        cache_salt=prompt.cache_salt,
        tenant=tenant,
        second_from=prompt.second_from,
        adapter=adapter,
        features=prompt.features,
    )
    name = str(number) if request_id is None else request_id
    return PoolingState(name, number, prompt, params, adapter=adapter)


def scored_pairs(data_1: object, data_2: object) -> list[ScoredPair]:
    """Return the pairs that score() compares: one with each, or each with the one at its position.

    Errors: InvalidRequestError.
    """
    first, second = _sides(data_1), _sides(data_2)
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise InvalidRequestError(f"score() pairs 1 text with n, or n with n; got {len(first)} and {len(second)}")
    return list(zip(first, second, strict=True))


def _sides(given: object) -> list[ScoredSide]:
    sides = [given] if isinstance(given, (str, Mapping)) else list(given) if isinstance(given, Sequence) else []
    for side in sides or [None]:
        if not isinstance(side, str) and not (isinstance(side, Mapping) and isinstance(side.get("content"), list)):
            raise InvalidRequestError(
                "score() takes a str or a list of str on either side; for a reranker that reads images also "
                '{"content": [...]}, with the parts of a message'
            )
    return sides


def texts_to_embed(pairs: Sequence[ScoredPair], instruction: str | None) -> list[str]:
    """Return the different texts of pairs, in order. Errors: InvalidRequestError for what is only for rerankers."""
    if instruction:
        raise InvalidRequestError("instruction is for rerankers: put it before the texts that are embedded")
    texts = [side for pair in pairs for side in pair if isinstance(side, str)]
    if len(texts) < 2 * len(pairs):
        raise InvalidRequestError('score() takes {"content": ...} for rerankers only: call embed_chats()')
    return list(dict.fromkeys(texts))


def pair_prompt(
    engine: EngineHandle, pair: ScoredPair, template: str | None, instruction: str | None = None
) -> PromptInput:
    """Return the prompt of a reranker for a pair: an ImagePrompt if it has images, otherwise with all special tokens.

    template: a format string with {query} and {document}. None = what the chat template of _pair_template() makes of
    messages of the roles "query" and "document"; without one, the pair as the tokenizer's post-processor joins two
    texts. instruction: for a chat template, a message of the role "system" before them. Errors: InvalidRequestError.
    """
    if instruction is not None and not isinstance(instruction, str):
        raise InvalidRequestError(f"instruction must be a str, got {type(instruction).__name__}")
    tokenizer, source = engine.tokenizer, None
    if template is None and tokenizer is not None:
        source = _pair_template(tokenizer.chat_templates)
    if instruction and source is None:
        raise InvalidRequestError(
            'instruction needs a chat template that names the roles "query" and "document": give one with '
            "--chat-template FILE, or write the instruction into template"
        )
    query, document = (side if isinstance(side, str) else side["content"] for side in pair)
    if source is not None and tokenizer is not None:
        roles = {"system": instruction or None, "query": query, "document": document}
        messages = [{"role": role, "content": content} for role, content in roles.items() if content is not None]
        return _rendered_pair(engine, tokenizer, source, messages)
    if not isinstance(query, str) or not isinstance(document, str):
        raise InvalidRequestError('a pair with {"content": ...} needs a chat template that names the roles of pairs')
    if template is not None:
        if "{query}" not in template or "{document}" not in template:
            raise InvalidRequestError("a template for score() must have {query} and {document}")
        return template.replace("{query}", query).replace("{document}", document)
    if engine.tokenizer is None:
        raise InvalidRequestError("this engine has no tokenizer: score() needs texts, use classify() with token ids")
    ids, second_from = engine.tokenizer.encode_pair(query, document)
    return {"prompt_token_ids": ids, "second_from": second_from}


def _rendered_pair(
    engine: EngineHandle, tokenizer: Tokenizer, source: str, messages: list[dict[str, Any]]
) -> PromptInput:
    """Return the prompt that a chat template makes of a pair. Errors: InvalidRequestError; those of render_chats()."""
    if has_images(messages):
        if engine.images is None:
            raise no_images("the pair")
        (prompt,) = engine.render_chats(
            [messages], chat_template=source, add_generation_prompt=True, tools=None, kwargs=None
        )
        return prompt
    text = render_chat(source, messages, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    return {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}


def _pair_template(templates: Mapping[str, str]) -> str | None:
    """Return the chat template that names the roles "query" and "document"; None = there is none.

    templates: by name. It is the default one, otherwise the one with a name, as Qwen3-VL-Reranker's files have it.
    Errors: InvalidRequestError for several with other names than "reranker", and a default one that is no template.
    """
    if (usual := templates.get("default")) is not None and reads_pairs(usual):
        return usual
    found = {name: text for name, text in templates.items() if name != "default" and _may_read_pairs(text)}
    if len(found) > 1 and "reranker" not in found:
        names = ", ".join(found)
        raise InvalidRequestError(f"several chat templates read pairs ({names}): give one with --chat-template FILE")
    return found.get("reranker") or next(iter(found.values()), None)


def _may_read_pairs(template: str) -> bool:
    """Return whether it names the roles of pairs; one that is no template is not used, and so is no error."""
    try:
        return reads_pairs(template)
    except InvalidRequestError:
        return False
