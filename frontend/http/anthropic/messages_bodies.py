"""The bodies of Anthropic's Messages API, converted to our chats."""

from typing import Any

from frontend.http.bodies import ChatBody, ChatFields, Json, shared_fields
from frontend.http.errors import HttpError
from frontend.http.left_out import Note, is_hosted_block

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class CountBody(ChatFields, kw_only=True):
    """The body of /v1/messages/count_tokens, and the fields that /v1/messages shares with it."""

    messages: list[Json]
    system: str | list[Json] | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None
    output_config: Json | None = None
    output_format: Json | None = None

    cache_control: Json | None = None  # see breakpoints.py

    # Accepted, but without effect on the answer.
    context_management: Any = None
    inference_geo: Any = None
    speed: Any = None

    # Refused by name.
    container: Any = None
    mcp_servers: Any = None


class MessagesBody(CountBody, kw_only=True):
    """The body of /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None


def chat_of(body: CountBody, note: Note) -> ChatBody:
    """Return the chat that a body asks for. note: called with the parts of the history that are left out.

    Errors: HttpError 400 that names the field.
    """
    for name in ("container", "mcp_servers"):
        if getattr(body, name):
            raise HttpError(400, f"{name} is not supported by this server", param=name)
    systems = [_text(body.system, "system")] if body.system else []
    messages: list[Json] = []
    for index, given in enumerate(body.messages):
        where, message = f"messages[{index}]", _without_hosted(given, note)
        match message.get("role"):
            case "user":
                messages += _user_messages(message.get("content"), where)
            case "assistant":
                messages.append(_assistant_message(message.get("content"), where))
            case "system":  # in the middle: templates take only one, at the beginning
                systems.append(_text(message.get("content"), where))
            case role:
                raise HttpError(400, f"{where}: the role must be user or assistant, got {role!r:.40}", param="messages")
    if systems:
        messages.insert(0, {"role": "system", "content": "\n\n".join(systems)})
    fields = shared_fields(body)
    thinks = (body.thinking or {}).get("type") in ("enabled", "adaptive")
    fields["chat_template_kwargs"] = {"enable_thinking": thinks, **(body.chat_template_kwargs or {})}
    if body.continue_final_message is None and body.add_generation_prompt is None:
        fields["continue_final_message"] = messages[-1]["role"] == "assistant" if messages else False
    chat = ChatBody(
        messages=messages,
        tools=[_tool(tool) for tool in body.tools or []] or None,
        tool_choice=_tool_choice(body.tool_choice),
        **fields,
    )
    if (form := _response_format(body)) is not None:
        chat.response_format = form
    if (body.tool_choice or {}).get("disable_parallel_tool_use"):
        chat.parallel_tool_calls = False
    if isinstance(body, MessagesBody) and body.stop_sequences is not None:
        chat.stop = body.stop_sequences
    return chat


def _without_hosted(message: Json, note: Note) -> Json:
    """Return a message without the blocks of tools that the service would run."""
    blocks = message.get("content")
    if not isinstance(blocks, list):
        return message
    kept = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if is_hosted_block(kind):
            note(f"blocks of type {kind!r:.60}")
        else:
            kept.append(block)
    return {**message, "content": kept}


def _user_messages(content: Any, where: str) -> list[Json]:
    """Return a message of the user: results of tools, each as a separate message, and text and images."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    messages: list[Json] = []
    parts: list[Json] = []  # of the last message, if it is the user's
    for block in _blocks(content, where):
        if block.get("type") == "tool_result":
            given = block.get("content") or ""
            result = given if isinstance(given, str) else _content(_parts(given, where))
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
            parts = []
        else:
            if not parts:
                messages.append({"role": "user"})
            parts.append(_part(block, where))
            messages[-1]["content"] = _content(parts)
    return messages or [{"role": "user", "content": ""}]


def _content(parts: list[Json]) -> str | list[Json]:
    """Return parts as a text, or unchanged if one is an image."""
    is_text = all(part["type"] == "text" for part in parts)
    return "\n".join(part["text"] for part in parts) if is_text else list(parts)


def _parts(content: Any, where: str) -> list[Json]:
    return [_part(block, where) for block in _blocks(content, where)]


def _part(block: Json, where: str) -> Json:
    """Return a block as a part of a chat's message. A block that is not an image is refused when images are read."""
    source = block.get("source")
    if block.get("type") != "image" or not isinstance(source, dict):
        return {"type": "text", "text": _block_text(block, where)}
    url = source.get("url")
    if source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _assistant_message(content: Any, where: str) -> Json:
    message: Json = {"role": "assistant", "content": content}
    if isinstance(content, str):
        return message
    texts, calls = [], []
    for block in _blocks(content, where):
        match block.get("type"):
            case "thinking":
                message["reasoning_content"] = message.get("reasoning_content", "") + str(block.get("thinking") or "")
            case "redacted_thinking":
                continue
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case _:
                texts.append(_block_text(block, where))
    message["content"] = "".join(texts)
    return {**message, "tool_calls": calls} if calls else message


def _blocks(content: Any, where: str) -> list[Json]:
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise HttpError(400, f"{where}: content must be a text or a list of blocks", param="messages")
    return content


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_block_text(block, where) for block in _blocks(content, where))


def _block_text(block: Json, where: str) -> str:
    text = block.get("text")
    if block.get("type") == "tool_reference" and isinstance(block.get("tool_name"), str):
        return str(block["tool_name"])  # of a tool search: all tools of a request are shown anyway
    if block.get("type") != "text" or not isinstance(text, str):
        raise HttpError(
            400, f"{where}: blocks of type {block.get('type')!r:.40} are not supported here", param="messages"
        )
    return text


def _tool(tool: Json) -> Json:
    if tool.get("type") not in (None, "custom"):
        return tool  # left out when all tools of chats are read
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Json | None) -> str | Json | None:
    kind = None if choice is None else choice.get("type")
    if choice is None or kind is None:
        return None
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise HttpError(400, f"tool_choice must be auto, any, tool or none; got {kind!r:.40}", param="tool_choice")
    return _CHOICES[kind]


def _response_format(body: CountBody) -> Json | None:
    given = body.output_format or (body.output_config or {}).get("format")
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        raise HttpError(400, "output_config.format must have the type json_schema", param="output_config")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given.get("schema")}}
