"""Constraints from the OpenAI API's fields: response_format, tools with tool_choice, and reasoning before an answer.

They are for servers. Each function returns StructuredOutputsParams for SamplingParams(structured_outputs=...).
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ipc.errors import InvalidRequestError
from ipc.structured_outputs import StructuredOutputsParams

_MARKED = re.compile(r"<[^<>\s\"]+>")


class ToolFormat(NamedTuple):
    """How a model writes a call of a tool: begin, a JSON object with the tool's name and its arguments, end."""

    begin: str = "<tool_call>\n"
    end: str = "\n</tool_call>"
    name_key: str = "name"
    arguments_key: str = "arguments"  # Llama's: "parameters"
    separator: str = "\n"  # between two calls


def constraint_of_response_format(response_format: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    """Return the constraint of an OpenAI response_format; None for text. Errors: InvalidRequestError."""
    kind = None if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=json.dumps(dict(response_format), ensure_ascii=False))
    if kind != "json_schema":
        raise InvalidRequestError(
            f"response_format has type text, json_object, json_schema or structural_tag, got {kind!r:.80}"
        )
    described = response_format.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, dict):
        raise InvalidRequestError("response_format of type json_schema needs json_schema.schema, a JSON object")
    return StructuredOutputsParams(json=schema)


def constraint_of_tools(
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any] | None,
    form: ToolFormat,
    *,
    parallel: bool = True,
    special_tokens: Collection[str] = (),
) -> StructuredOutputsParams | None:
    """Return the constraint of a tool_choice: None for "auto", "none" and None, which leave the text free.

    "required": one call of any tool, or several with parallel. {"type": "function", "function": {"name": ...}}: one
    call of this tool. special_tokens: the model's special tokens, which are no text, by name. Errors:
    InvalidRequestError.
    """
    if tool_choice in (None, "none", "auto"):
        return None
    functions = [_function(tool) for tool in tools]
    if isinstance(tool_choice, Mapping):
        named = tool_choice.get("function")
        name = named.get("name") if isinstance(named, Mapping) else None
        functions, parallel = [one for one in functions if one["name"] == name], False
        if not functions:
            raise InvalidRequestError(f"tool_choice names the tool {name!r:.80}, which tools does not have")
    elif tool_choice != "required" or not functions:
        raise InvalidRequestError(
            f"tool_choice is none, auto, required (with tools) or a function's name, got {tool_choice!r:.80}"
        )
    calls = [_call_schema(one, form) for one in functions]
    call = " ".join([*_literals(form.begin, special_tokens), "tool_json", *_literals(form.end, special_tokens)])
    more = " ".join([*_literals(form.separator, special_tokens), "call"])
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    lines = [f"start: call ({more})*" if parallel else "start: call", f"call: {call}"]
    return StructuredOutputsParams(grammar="\n".join([*lines, f"tool_json: %json {_json(schema)}"]))


def after_reasoning(
    answer: StructuredOutputsParams, end: str = "</think>", *, special_tokens: Collection[str] = ()
) -> StructuredOutputsParams:
    """Return the constraint of free text up to the mark `end`, and of an answer behind it.

    answer: of kind json, json_object or choice, or a grammar of constraint_of_tools(). Errors: InvalidRequestError.
    """
    if answer.kind == "json" or answer.kind == "json_object":
        body = f"answer: %json {answer.json or _json({'type': 'object'})}"
    elif answer.kind == "choice":
        body = "answer: " + " | ".join(_json(text) for text in answer.choice or ())
    elif answer.kind == "grammar" and (answer.grammar or "").startswith("start: call"):
        body = "answer: " + (answer.grammar or "").removeprefix("start: ")
    else:
        raise InvalidRequestError(f"an answer of kind {answer.kind} cannot follow reasoning: use json, or choice")
    thought = f"thought: TEXT {end}" if end in special_tokens else f"thought[lazy]: TEXT {_json(end)}"
    return StructuredOutputsParams(
        grammar="\n".join(["start: thought GAP answer", thought, "TEXT: /(.|\\n)*/", "GAP: /[ \\n]{0,4}/", body])
    )


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the function of a tool."""
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"a tool has type function and function.name, got {dict(tool)!r:.80}")
    return function


def _call_schema(function: Mapping[str, Any], form: ToolFormat) -> dict[str, Any]:
    """Return the JSON schema of a call."""
    arguments = function.get("parameters") or {"type": "object"}
    properties = {form.name_key: {"const": function["name"]}, form.arguments_key: arguments}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _literals(text: str, special_tokens: Collection[str]) -> list[str]:
    """Return a text as symbols of Lark: special tokens by their names, the rest as strings."""
    symbols, at = [], 0
    for found in _MARKED.finditer(text):
        if found.group() in special_tokens:
            symbols += [_json(text[at : found.start()]), found.group()]
            at = found.end()
    return [symbol for symbol in [*symbols, _json(text[at:])] if symbol != '""']


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
