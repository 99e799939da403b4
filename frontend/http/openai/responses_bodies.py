"""The body of OpenAI's Responses API, converted to our chat."""

from collections.abc import Callable, Sequence
from typing import Any

from frontend.http.bodies import ChatBody, ChatFields, Json, shared_fields
from frontend.http.errors import HttpError
from frontend.http.left_out import Note, is_hosted_item

_LOGPROBS = "message.output_text.logprobs"
_TEXTS = ("input_text", "output_text", "text", "refusal")
#: Field -> what to do instead.
_REFUSED = {
    "prompt": "send the text of the prompt",
    "max_tool_calls": "there are no built-in tools",
    "previous_response": "send the earlier items in `input`",
    "previous_input_messages": "send the earlier items in `input`",
    "enable_response_messages": "use the items of the answer",
}


class ResponsesBody(ChatFields, kw_only=True):
    """The body of /v1/responses: fields of all chats, and OpenAI's own names."""

    input: str | list[Json]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    text: Json | None = None
    reasoning: Json | None = None
    truncation: str | None = None

    include: list[str] | None = None  # of what else is named here there is none
    top_logprobs: int | None = None

    seed: int | None = None  # one of the numbers; one is drawn for a response in the background

    # What the store of responses keeps.
    store: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    conversation: str | Json | None = None  # the id of a conversation, or an object with it

    # Refused by name.
    prompt: Any = None
    max_tool_calls: Any = None
    previous_response: Any = None
    previous_input_messages: Any = None
    enable_response_messages: Any = None


def shows_logprobs(body: ResponsesBody) -> bool:
    """Return whether an answer has the log probabilities of its text."""
    return _LOGPROBS in (body.include or ())


def chat_of(body: ResponsesBody, note: Note, history: Sequence[Json] = ()) -> ChatBody:
    """Return the chat that a body asks for. note: called with the parts of the history that are left out.

    history: the items of the responses that it continues.

    Errors: HttpError 400 that names the field.
    """
    for name, instead in _REFUSED.items():
        if getattr(body, name):
            raise HttpError(400, f"{name} is not supported: {instead}", param=name)
    if body.truncation not in (None, "disabled", "auto"):
        text = f"truncation must be auto or disabled; got {body.truncation!r:.40}"
        raise HttpError(400, text, param="truncation")
    if body.top_logprobs and not shows_logprobs(body):
        raise HttpError(400, f'top_logprobs needs include: ["{_LOGPROBS}"]', param="top_logprobs")
    messages: list[Json] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    for index, item in enumerate([*history, *items_of(body)], -len(history)):
        if is_hosted_item(item.get("type")):
            note(f"items of type {item['type']!r:.60}")
        else:
            _add_item(messages, item, f"input[{index}]")
    chat = ChatBody(
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        logprobs=shows_logprobs(body),
        top_logprobs=body.top_logprobs,
        tools=[_tool(tool) for tool in body.tools or []] or None,
        tool_choice=_tool_choice(body.tool_choice),
        **shared_fields(body),
    )
    if (form := _response_format((body.text or {}).get("format"))) is not None:
        chat.response_format = form
    effort = (body.reasoning or {}).get("effort")
    if isinstance(effort, str):
        chat.reasoning_effort = effort
    return chat


def stored_items(body: ResponsesBody, draw: Callable[[], str]) -> list[Json]:
    """Return the items of a body's input as they are stored, each with an id. draw: returns a new id."""
    return with_ids(items_of(body), draw)


def items_of(body: ResponsesBody) -> list[Json]:
    """Return the items of a body's input."""
    return [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input


def conversation_of(body: ResponsesBody) -> str | None:
    """Return the id of the conversation that a response belongs to; None = of none. Errors: HttpError 400."""
    given = body.conversation.get("id") if isinstance(body.conversation, dict) else body.conversation
    if body.conversation is None:
        return None
    if not isinstance(given, str):
        raise HttpError(400, "conversation must be an id, or an object with an id", param="conversation")
    if body.previous_response_id is not None:
        text = "conversation and previous_response_id exclude each other: each names the earlier items"
        raise HttpError(400, text, param="conversation")
    return given


def check_items(items: Sequence[Json]) -> None:
    """Check that items can be in a history. Errors: HttpError 400."""
    messages: list[Json] = []
    for index, item in enumerate(items):
        if not is_hosted_item(item.get("type")):
            _add_item(messages, item, f"items[{index}]")


def last_items(items: Sequence[Json], num_dropped: int) -> list[Json]:
    """Return items without the first ones, and without results whose calls are among these."""
    kept = items[num_dropped:]
    calls = {item.get("call_id") for item in kept if item.get("type") == "function_call"}
    return [item for item in kept if item.get("type") != "function_call_output" or item.get("call_id") in calls]


def with_ids(items: Sequence[Json], draw: Callable[[], str]) -> list[Json]:
    """Return items as they are stored, each with an id. draw: returns a new id."""
    found = []
    for item in items:
        kind, content = item.get("type", "message"), item.get("content")
        if kind == "message" and isinstance(content, str):
            part = {"type": "output_text", "text": content, "annotations": [], "logprobs": []}
            is_answer = item.get("role") == "assistant"
            content = [part if is_answer else {"type": "input_text", "text": content}]
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}.get(kind, "item")
        own = {"content": content} if content is not None else {}
        found.append({"id": f"{prefix}_{draw()}", "status": "completed", **item, "type": kind, **own})
    return found


def _add_item(messages: list[Json], item: Json, where: str) -> None:
    """Add an item of the history. Reasoning, text and calls of one answer are one message."""
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            content = _content(item.get("content"), where)
            if role == "assistant" and "content" not in (answer := _answer(messages)):
                answer["content"] = content
            else:
                messages.append({"role": role, "content": content})
        case "reasoning":
            texts = [_text(item.get(name) or [], where) for name in ("content", "summary")]
            answer = _answer(messages)
            answer["reasoning_content"] = answer.get("reasoning_content", "") + (texts[0] or texts[1])
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            answer = _answer(messages)
            answer["tool_calls"] = [*answer.get("tool_calls", []), call]
            answer.setdefault("content", None)
        case "function_call_output":
            output = _content(item.get("output"), where)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        case kind:
            raise HttpError(400, f"{where}: items of type {kind!r:.40} are not supported", param="input")


def _answer(messages: list[Json]) -> Json:
    """Return the last message if it is the model's, otherwise a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _content(content: Any, where: str) -> str | list[Any]:
    """Return the text of a content, or its parts if it has images."""
    if not isinstance(content, list) or all(_kind_of(part) != "input_image" for part in content):
        return _text(content, where)
    return [_image(part, where) or {"type": "text", "text": _text([part], where)} for part in content]


def _image(part: Any, where: str) -> Json | None:
    """Return an image part in a chat's form; None for another part."""
    if _kind_of(part) != "input_image":
        return None
    if not isinstance(part.get("image_url"), str):
        raise HttpError(
            400, f"{where}: an image must be an image_url with a data: URL; files are not stored here", param="input"
        )
    return {"type": "image_url", "image_url": {"url": part["image_url"]}}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise HttpError(400, f"{where}: content must be a text or a list of parts", param="input")
    texts = []
    for part in content:
        kind = _kind_of(part)
        text = None if kind is None else part.get("refusal" if kind == "refusal" else "text")
        if kind not in (*_TEXTS, "reasoning_text", "summary_text") or not isinstance(text, str):
            raise HttpError(400, f"{where}: parts of type {kind!r:.40} are not supported here", param="input")
        texts.append(text)
    return "\n".join(texts)


def _kind_of(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else None


def _tool(tool: Json) -> Json:
    if tool.get("type") != "function":
        return tool  # left out or refused when all tools of chats are read
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _tool_choice(choice: str | Json | None) -> str | Json | None:
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return choice
    return {"type": "function", "function": {"name": choice.get("name")}}


def _response_format(form: Any) -> Json | None:
    if form is None:
        return None
    if not isinstance(form, dict):
        raise HttpError(400, 'text.format must be an object with a "type"', param="text")
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {"name": form.get("name"), "schema": form.get("schema")}}
