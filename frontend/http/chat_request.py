"""PreparedChat: a chat as requests to the engine, and the readers of its answers' text."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from frontend.calls.choose import has_special_marks, shows_tools
from frontend.calls.constraint import Thought, constrain, forced_functions, read_allowed, read_functions
from frontend.calls.formats import (
    HARMONY_ANSWER,
    HARMONY_THOUGHT,
    HARMONY_TOOLS,
    HERMES,
    HERMES_TOOLS,
    AnswerForm,
)
from frontend.calls.scanner import Scanner
from frontend.calls.tool_prompt import with_tools, without_calls
from frontend.http.bodies import ChatBody, Json
from frontend.http.errors import PEER_LEFT, HttpError
from frontend.http.left_out import Note, own_choice, own_tools
from frontend.http.pins import num_common
from frontend.http.replies.thought_tokens import ThoughtTokens, thought_tokens
from frontend.http.request import Request
from frontend.http.sampling import read_sampling
from frontend.http.service import Service, tenant_of
from frontend.images.chat_images import has_images, urls_to_fetch, with_files
from frontend.session import PreparedRequest
from frontend.text.prompt_forms import PromptInput
from frontend.text.prompts import text_of
from ipc.params.sampling_params import SamplingParams
from ipc.wire.pin_messages import Pin

MAX_MESSAGES = 4096
MAX_TOOLS = 128
_TOO_DEEP = "objects and arrays nest too deep in this body"
_REASONING = ("reasoning_content", "reasoning", "thinking")  # names of one field of an earlier answer


class PreparedChat(NamedTuple):
    """A chat that is ready to be submitted. scanners: of each choice; None = all of the text is content.

    thoughts: counters of the tokens of reasoning, of each choice; none if reasoning is not separated.
    is_named: whether the caller named the one tool that must be called. id_length: of calls' ids; None = any.
    """

    requests: list[PreparedRequest]
    scanners: list[Scanner] | None = None
    is_named: bool = False
    id_length: int | None = None
    thoughts: Sequence[ThoughtTokens] = ()


class _Tools(NamedTuple):
    """The tools of a request. forced: those of which one must be called; None = the model decides.

    is_named: whether the caller named the one that must be called.
    """

    shown: list[Json] | None
    functions: dict[str, Mapping[str, Any]]
    forced: list[Mapping[str, Any]] | None
    is_named: bool = False


async def prepare_chat(
    service: Service, request: Request, body: ChatBody, context: Sequence[int] | None = None
) -> PreparedChat:
    """Render and tokenize a chat. context: tokens before it; None = none. Errors: HttpError, InvalidRequestError."""
    check_chat(service, body)
    _add_system(service, body)
    if body.max_completion_tokens is not None:  # the newer name of both
        body.max_tokens = body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None

    def prepare() -> PreparedChat:
        params = read_sampling(body, service.default_sampling, max_tokens=None, logprobs=logprobs)
        try:
            return _prepare(service, request, body, params, _read_tools(body, service.meter.note_left_out), context)
        except RecursionError:
            raise HttpError(400, _TOO_DEEP) from None

    have_images = has_images(body.messages)
    if have_images:
        service.check_held(request)
    async with with_fetched(service, request, [body]):
        is_long = have_images or service.brings_template(body.chat_template)
        prepared = await service.run(request, prepare, is_long=is_long)
        service.hold(request, prepared.requests)  # before it waits: others are read in that time
        return prepared


@contextlib.asynccontextmanager
async def with_fetched(service: Service, request: Request, bodies: Sequence[ChatBody]) -> AsyncIterator[None]:
    """Within this context the images of URLs are files in these chats, if the server fetches images and the model takes
    them. Errors: InvalidRequestError, HttpError.
    """
    urls = [url for body in bodies for url in urls_to_fetch(body.messages)]
    if not urls or (media := service.shared.media) is None or service.engine.images is None:
        yield
        return
    if request.lease is not None:
        request.lease.check_tokens(1)
    given = [body.messages for body in bodies]
    async with contextlib.AsyncExitStack() as fetched:
        with _while_here(request):
            files = await fetched.enter_async_context(media.fetched(urls, tenant_of(request)))
        num_bytes = sum(map(len, files.values()))
        for body in bodies:
            body.messages = with_files(body.messages, files)
        request.num_stored_bytes += num_bytes
        try:
            yield
        finally:
            for body, messages in zip(bodies, given, strict=True):
                body.messages = messages
            request.num_stored_bytes -= num_bytes


@contextlib.contextmanager
def _while_here(request: Request) -> Iterator[None]:
    """Within this context the task waits for other servers, until its peer leaves. Errors: HttpError 499."""
    exchange, task = request.exchange, asyncio.current_task()
    if exchange.has_left:
        raise HttpError(499, PEER_LEFT)

    def leave() -> None:
        if task is not None:
            task.cancel()

    exchange.on_left = leave
    try:
        yield
    except asyncio.CancelledError:
        if exchange.has_left and task is not None and not task.uncancel():
            raise HttpError(499, PEER_LEFT) from None
        raise
    finally:
        exchange.on_left = None


def _add_system(service: Service, body: ChatBody) -> None:
    """Add the server's own system message to a chat without one."""
    has_one = any(message.get("role") in ("system", "developer") for message in body.messages)
    if (system := service.options.system) is not None and not has_one:
        body.messages = [{"role": "system", "content": system}, *body.messages]


async def count_tokens(service: Service, request: Request, body: ChatBody) -> int:
    """Return the number of tokens of a chat's prompt, even if it is too long to answer. Errors: as prepare_chat()."""
    check_chat(service, body)
    tokenizer = service.tokenizer

    def count() -> int:
        prompt = _rendered_text(service, body)
        service.check_countable(prompt)
        return len(tokenizer.encode(prompt, add_special_tokens=False))

    return await service.run(request, count)


async def render_text(service: Service, request: Request, body: ChatBody) -> str:
    """Return a chat's prompt as text. Errors: as prepare_chat()."""
    check_chat(service, body)
    is_long = service.brings_template(body.chat_template)
    return await service.run(request, lambda: _rendered_text(service, body), is_long=is_long)


async def render_prompt(service: Service, request: Request, body: ChatBody) -> PromptInput:
    """Return a chat's prompt, perhaps with images. Errors: as prepare_chat()."""
    check_chat(service, body)
    is_long = has_images(body.messages) or service.brings_template(body.chat_template)
    return await service.run(request, lambda: _rendered(service, body), is_long=is_long)


def _rendered(service: Service, body: ChatBody) -> PromptInput:
    try:
        return _render(service, body, _read_tools(body, service.meter.note_left_out))
    except RecursionError:
        raise HttpError(400, _TOO_DEEP) from None


def _rendered_text(service: Service, body: ChatBody) -> str:
    prompt = _rendered(service, body)
    if not isinstance(prompt, str):
        raise HttpError(400, "a prompt with images is no text: send the text alone", param="messages")
    return prompt


def check_chat(service: Service, body: ChatBody) -> None:
    """Check all that can be said without reading the messages. Errors: HttpError 400."""
    if len(body.messages) > MAX_MESSAGES:
        raise HttpError(400, f"{len(body.messages)} messages; at most {MAX_MESSAGES} are allowed", param="messages")
    if body.tools and len(body.tools) > MAX_TOOLS:
        raise HttpError(400, f"{len(body.tools)} tools; at most {MAX_TOOLS} are allowed", param="tools")
    if body.chat_template is not None and not service.options.allow_request_templates:
        raise HttpError(400, "chat_template is a program: this server accepts none in requests", param="chat_template")
    if body.top_logprobs and not body.logprobs:
        raise HttpError(400, "top_logprobs needs logprobs: true", param="top_logprobs")


def _read_tools(body: ChatBody, note: Note) -> _Tools:
    """Return the tools of a body that this server can have. Errors: HttpError, InvalidRequestError."""
    tools, choice = read_allowed(own_tools(body.tools or [], note), own_choice(body.tool_choice))
    functions = read_functions(tools)
    forced = forced_functions(functions, choice)
    if choice == "none":
        return _Tools(None, {}, None)
    return _Tools(tools or None, functions, forced, is_named=isinstance(choice, dict))


def behind(service: Service, context: Sequence[int] | None, prompt: PromptInput) -> PromptInput:
    """Return a prompt after the tokens of a context. Errors: HttpError 400 for a prompt with images."""
    if not context:
        return prompt
    if not isinstance(prompt, str):
        raise HttpError(400, "a context can be followed by text, not by images", param="context")
    service.check_countable(prompt)
    return [*context, *service.tokenizer.encode(prompt, add_special_tokens=False)]


def _prepare(
    service: Service,
    request: Request,
    body: ChatBody,
    params: SamplingParams,
    tools: _Tools,
    context: Sequence[int] | None,
) -> PreparedChat:
    prompt = _render(service, body, tools)
    form, thought = _form_of(service.form, tools, text_of(prompt))
    params = _constrained(service, body, params, tools, form, thought)
    is_scanned = form.is_harmony or form.reasoning is not None or (form.calls is not None and bool(tools.functions))
    if is_scanned and body.skip_special_tokens is None and has_special_marks(form, service.special_tokens):
        params = params.changed(skip_special_tokens=False)
    prompts = [behind(service, context, prompt)]
    requests = service.prepare(request, body, prompts, params, add_special_tokens=False)
    if request.breakpoints:
        requests = [_pinned(service, request, prompt, requests[0])]
    if not is_scanned:
        return PreparedChat(requests)
    schemas = {name: one.get("parameters") or {} for name, one in tools.functions.items()}
    scanners = [
        Scanner(
            form,
            schemas or None,
            is_parallel=body.parallel_tool_calls is not False,
            in_reasoning=thought is not None and thought.is_begun,
        )
        for _ in range(params.n)
    ]
    id_length = form.calls.id_length if form.calls is not None else None
    has_thoughts = form.is_harmony or form.reasoning is not None
    thoughts = thought_tokens(requests[0], scanners, service.tokenizer) if has_thoughts else ()
    return PreparedChat(requests, scanners, tools.is_named, id_length, thoughts)


def _pinned(service: Service, request: Request, prompt: PromptInput, prepared: PreparedRequest) -> PreparedRequest:
    """Return a chat's request with pins up to its breakpoints. With images, they are of the whole prompt."""
    pins, ids, tokenizer = list(prepared.pins), prepared.prompt.token_ids, service.tokenizer
    for ttl_ms, changed in request.breakpoints:
        count = len(ids)
        if changed is not None and isinstance(prompt, str):
            chat = changed()
            _add_system(service, chat)
            other = _render(service, chat, _read_tools(chat, lambda part: None))
            common = prompt[: num_common(prompt, other)] if isinstance(other, str) else ""
            count = num_common(ids, tokenizer.encode(common, add_special_tokens=False))
        if count:
            pins.append(Pin("", ttl_ms, count))
    return prepared._replace(pins=tuple(pins))


def _constrained(
    service: Service,
    body: ChatBody,
    params: SamplingParams,
    tools: _Tools,
    form: AnswerForm,
    thought: Thought | None,
) -> SamplingParams:
    """Return the parameters with the grammar of the whole answer, if one is needed. Errors: InvalidRequestError."""
    answer, functions = params.structured_outputs, tools.forced
    if functions is not None:
        answer = None
    elif answer is not None and tools.functions:
        functions = list(tools.functions.values())  # an answer of the given structure, or calls
    constraint = constrain(
        answer,
        functions,
        HARMONY_TOOLS if form.is_harmony else (form.calls and form.calls.forced) or HERMES_TOOLS,
        is_parallel=body.parallel_tool_calls is not False and not tools.is_named,
        thought=thought,
        answer_begin=HARMONY_ANSWER if form.is_harmony else "",
        special_tokens=service.special_tokens,
    )
    if constraint is params.structured_outputs:
        return params
    constrained = params.changed(structured_outputs=constraint)
    constrained.check_structured_outputs()
    return constrained


def _render(service: Service, body: ChatBody, tools: _Tools) -> PromptInput:
    """Return the prompt. Errors: InvalidRequestError."""
    kwargs: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            kwargs.setdefault("enable_thinking", False)
    if body.documents is not None:
        kwargs.setdefault("documents", body.documents)
    continues = bool(body.continue_final_message)
    messages, shown = [_with_reasoning(message) for message in body.messages], tools.shown
    tokenizer = service.engine.tokenizer
    if tokenizer is not None and not shows_tools(
        tokenizer.choose_chat_template(body.chat_template, with_tools=bool(shown))
    ):
        messages = with_tools(messages, shown) if shown else without_calls(messages)
        shown = None
    (prompt,) = service.engine.render_chats(
        [messages],
        chat_template=body.chat_template,
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        tools=shown,
        kwargs=kwargs,
        takes_files=False,
        render=service.renderer(body.chat_template),
    )
    return prompt


def _with_reasoning(message: Json) -> Json:
    """Return an earlier answer with its reasoning under all names that templates read.

    Not as "thinking" together with content and calls: gpt-oss' template refuses that.
    """
    given = next((message[name] for name in _REASONING if isinstance(message.get(name), str)), None)
    if not given or message.get("role") != "assistant":
        return message
    names = _REASONING[:2] if message.get("content") and message.get("tool_calls") else _REASONING
    return {**message, **dict.fromkeys(names, given)}


def _form_of(form: AnswerForm, tools: _Tools, prompt: str) -> tuple[AnswerForm, Thought | None]:
    """Return how the answer to this prompt is written, and the reasoning before it; None = there is none."""
    if form.is_harmony:
        return form, Thought(*HARMONY_THOUGHT)
    if tools.forced is not None and (form.calls is None or form.calls.forced is None):
        form = form._replace(calls=HERMES)
    if form.reasoning is None:
        return form, None
    begin, end = form.reasoning
    tail = prompt.rstrip()
    if tail.endswith(end):
        return form._replace(reasoning=None), None
    return form, Thought(begin, end, tail.endswith(begin))
