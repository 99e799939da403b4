"""Parts of a request that only a hosted service supports: tools that the service runs, and their items in a history.

They are left out and named in the log, because a model does not call a tool that it is not shown. A request fails only
if its tool_choice requires such a tool.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from frontend.http.errors import HttpError

Json = dict[str, Any]
#: Called with the name of a part that is left out.
Note = Callable[[str], None]

#: Items of the Responses API. A function's call and its result have other types.
_HOSTED_ITEM = re.compile(r"[a-z0-9_]+_call(_output)?|tool_search_output|additional_tools|mcp_[a-z_]+")
_OWN_ITEMS = ("function_call", "function_call_output")
#: Blocks of the Messages API.
_HOSTED_BLOCK = re.compile(r"[a-z0-9_]+_tool_(use|result)|tool_search_[a-z0-9_]+")


def is_hosted_item(kind: object) -> bool:
    """Return whether an item of this type in a history of /v1/responses belongs to a tool that is not a function."""
    return isinstance(kind, str) and kind not in _OWN_ITEMS and _HOSTED_ITEM.fullmatch(kind[:80]) is not None


def is_hosted_block(kind: object) -> bool:
    """Return whether a block of this type in a history of /v1/messages belongs to a tool that the service runs."""
    return isinstance(kind, str) and _HOSTED_BLOCK.fullmatch(kind[:80]) is not None


def own_tools(tools: Sequence[Json], note: Note) -> list[Json]:
    """Return the functions, and tools without a type; report the kinds of the others."""
    kept = []
    for tool in tools:
        if _is_hosted(tool):
            note(f"tools of type {tool['type']!r:.60}, which this server does not run")
        else:
            kept.append(tool)
    return kept


def own_choice(choice: object) -> object:
    """Return a tool_choice without the tools that are left out. Errors: HttpError 400 if it requires one of those."""
    if not isinstance(choice, Mapping):
        return choice
    kind = choice.get("type")
    if kind not in (None, "function", "allowed_tools"):
        raise HttpError(400, f"a tool_choice of type {kind!r:.60} is not supported: use functions", param="tool_choice")
    if kind != "allowed_tools":
        return choice
    nested = choice.get("allowed_tools")
    allowed: Mapping[str, Any] = nested if isinstance(nested, Mapping) else choice
    entries = allowed.get("tools")
    kept = [one for one in entries if not _is_hosted(one)] if isinstance(entries, list) else entries
    if kept or not entries:
        return {"type": kind, "mode": allowed.get("mode", "auto"), "tools": kept}
    if allowed.get("mode") == "required":
        raise HttpError(400, "tool_choice requires tools that are not functions", param="tool_choice")
    return "none"


def _is_hosted(tool: object) -> bool:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    return isinstance(kind, str) and kind != "function"
