"""Breakpoints: the blocks of a body of Anthropic's API with cache_control, up to which its prompt is pinned."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from frontend.http.anthropic.messages_bodies import CountBody, chat_of
from frontend.http.bodies import ChatBody, Json
from frontend.http.errors import HttpError
from frontend.http.request import Breakpoint

MAX_BREAKPOINTS = 4
_TTLS = {"5m": 300_000, "1h": 3_600_000}
_MARK = "\x00"  # the first text that differs after a breakpoint
#: Makes the body in which other text follows a block.
_Change = Callable[[], CountBody]


def breakpoints_of(body: CountBody) -> list[Breakpoint]:
    """Return the breakpoints of a body, in the order of the prompt. Errors: HttpError 400."""
    found: list[Breakpoint] = []
    for control, change in _marked(body):
        found.append(Breakpoint(_ttl_ms(control), None if change is None else partial(_changed, change)))
    if body.cache_control is not None:
        found.append(Breakpoint(_ttl_ms(body.cache_control), None))
    if len(found) > MAX_BREAKPOINTS:
        raise HttpError(400, f"{len(found)} blocks have cache_control; at most {MAX_BREAKPOINTS} may")
    return found


def _changed(change: _Change) -> ChatBody:
    return chat_of(change(), lambda part: None)


def _ttl_ms(control: Any) -> int:
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        raise HttpError(400, f"cache_control must be {{'type': 'ephemeral'}}, got {control!r:.60}")
    ttl = control.get("ttl") or "5m"
    if not isinstance(ttl, str) or ttl not in _TTLS:
        raise HttpError(400, f"the ttl of cache_control must be 5m or 1h, got {ttl!r:.40}")
    return _TTLS[ttl]


def _marked(body: CountBody) -> Iterator[tuple[Any, _Change | None]]:
    """Yield the cache_control of each block that has one, and how the body changes after it; None = it is the end."""
    for index, tool in enumerate(body.tools or []):
        if (control := tool.get("cache_control")) is not None:
            yield control, partial(_with, body, "tools", index, partial(_after_tool, tool))
    systems = body.system if isinstance(body.system, list) else []
    for index, block in enumerate(systems):
        if isinstance(block, dict) and (control := block.get("cache_control")) is not None:
            yield control, partial(_with, body, "system", index, partial(_after_block, block))
    for index, message in enumerate(body.messages):
        blocks = message.get("content")
        for place, block in enumerate(blocks if isinstance(blocks, list) else []):
            if not isinstance(block, dict) or (control := block.get("cache_control")) is None:
                continue
            is_end = index == len(body.messages) - 1 and place == len(blocks or ()) - 1
            change = partial(_after_part, message, place, block)
            yield control, None if is_end else partial(_with, body, "messages", index, change)


def _with(body: CountBody, name: str, index: int, change: Callable[[], Json]) -> CountBody:
    """Return a body with another entry in one of its lists."""
    entries = list(getattr(body, name))
    entries[index] = change()
    changed: CountBody = msgspec.structs.replace(body, **{name: entries})
    return changed


def _after_part(message: Json, place: int, block: Json) -> Json:
    blocks = list(message["content"])
    blocks[place] = _after_block(block)
    return {**message, "content": blocks}


def _after_tool(tool: Json) -> Json:
    """Return a tool with other text after its description: what follows in the prompt is not pinned."""
    return {**tool, "description": str(tool.get("description") or "") + _MARK}


def _after_block(block: Json) -> Json:
    """Return a block with other text after its own."""
    match block.get("type"):
        case "tool_result":
            content = block.get("content") or ""
            more = content + _MARK if isinstance(content, str) else [*content, {"type": "text", "text": _MARK}]
            return {**block, "content": more}
        case "tool_use":
            return {**block, "name": f"{block.get('name')}{_MARK}"}
        case "thinking":
            return {**block, "thinking": f"{block.get('thinking') or ''}{_MARK}"}
        case _:
            return {**block, "text": f"{block.get('text') or ''}{_MARK}"}
