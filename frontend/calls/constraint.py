"""The grammar of a chat's answer: reasoning, then calls of tools or an answer of a given structure.

It is one grammar for the whole text, in the form that a scanner reads back, so the engine needs no parser of its own.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from frontend.calls.formats import HERMES_TOOLS, ToolFormat
from ipc.errors import InvalidRequestError
from ipc.params.choices import MANY_CHOICES, pattern_of
from ipc.params.gbnf import rule_of_grammar
from ipc.params.json_schemas import close_objects, drop_annotations, spell_dependencies
from ipc.params.schema_numbers import keep_numbers
from ipc.params.structured_outputs import StructuredOutputsParams

Json = Mapping[str, Any]

#: The JSON of a call is written as chat templates write earlier calls. So there is little left to choose, and tokens
#: that a grammar forces need no steps.
_CALL_JSON: Json = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
#: White space in an answer is bounded because small models may write it without end.
_ANSWER_JSON: Json = {"whitespace_pattern": r"[ \n\t]{0,20}"}
_COMPACT_JSON: Json = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
#: Characters that end a regex or its line in Lark's notation, unless already escaped.
_REGEX_MARKS = re.compile(r"\\.|[/\n]", re.DOTALL)
_NAME = "{name}"
_MAX_CALLS = 32  # of one answer; a small model that is forced to call may never stop


class Thought(NamedTuple):
    """Reasoning before an answer. is_begun: the prompt contains the begin mark; otherwise there may be no reasoning."""

    begin: str
    end: str
    is_begun: bool = False


def read_functions(tools: Sequence[Json]) -> dict[str, Json]:
    """Return the functions of these tools by name. Errors: InvalidRequestError."""
    functions: dict[str, Json] = {}
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidRequestError(f"a tool must have type function and a function.name, got {tool!r:.80}")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise InvalidRequestError(f"a tool's parameters must be a JSON schema, got {parameters!r:.80}")
        functions[function["name"]] = function
    return functions


def read_allowed(tools: Sequence[dict[str, Any]], tool_choice: object) -> tuple[list[dict[str, Any]], object]:
    """Return the tools that a choice of type allowed_tools allows, and its mode; otherwise both unchanged.

    The names may have the form of OpenAI's chats or of its Responses API. Errors: InvalidRequestError.
    """
    if not isinstance(tool_choice, Mapping) or tool_choice.get("type") != "allowed_tools":
        return list(tools), tool_choice
    nested = tool_choice.get("allowed_tools")
    chosen = nested if isinstance(nested, Mapping) else tool_choice
    mode, entries = chosen.get("mode", "auto"), chosen.get("tools")
    if mode not in ("auto", "required") or not isinstance(entries, (list, tuple)) or not entries:
        raise InvalidRequestError(
            "tool_choice of type allowed_tools must have a mode, auto or required, and a list of tools"
        )
    names = []
    for entry in entries:
        function = entry.get("function", entry) if isinstance(entry, Mapping) else None
        names.append(function.get("name") if isinstance(function, Mapping) else None)
    known = read_functions(tools)
    if unknown := [name for name in names if not isinstance(name, str) or name not in known]:
        raise InvalidRequestError(f"tool_choice allows the tool {unknown[0]!r:.80}, which is not in tools")
    return [tool for tool in tools if tool["function"]["name"] in names], mode


def forced_functions(functions: Mapping[str, Json], tool_choice: object) -> list[Json] | None:
    """Return the functions of which the answer must call one; None if it may be text. Errors: InvalidRequestError.

    tool_choice: "none", "auto" and None leave the answer free; "required" and a function's name do not.
    """
    if tool_choice in (None, "none", "auto"):
        return None
    if isinstance(tool_choice, Mapping):
        named = tool_choice.get("function")
        name = named.get("name") if isinstance(named, Mapping) else None
        if not isinstance(name, str) or name not in functions:
            raise InvalidRequestError(f"tool_choice names the tool {name!r:.80}, which is not in tools")
        return [functions[name]]
    if tool_choice == "required" and not functions:
        raise InvalidRequestError("tool_choice is required, but there are no tools")
    if tool_choice != "required":
        raise InvalidRequestError(
            f"tool_choice must be none, auto, required, a function's name or allowed_tools, got {tool_choice!r:.80}"
        )
    return list(functions.values())


def constrain(
    answer: StructuredOutputsParams | None,
    functions: Sequence[Json] | None = None,
    form: ToolFormat = HERMES_TOOLS,
    *,
    is_parallel: bool = True,
    thought: Thought | None = None,
    answer_begin: str = "",
    special_tokens: Mapping[str, int] | None = None,
) -> StructuredOutputsParams | None:
    """Return the constraint of an answer; None = any text.

    answer: the structure of an answer that is not a call; None = no such answer. functions: those that may be called;
    is_parallel: several times. answer_begin: marks before an answer that is not a call. special_tokens: name -> id; a
    mark that is one of them is that token, otherwise text. A structure of kind structural_tag cannot be combined, but
    one of the newer form can follow reasoning that the prompt has begun. Errors: InvalidRequestError for one of the
    older form there, or if a special token ends the reasoning.
    """
    is_wrapped = bool(functions) or thought is not None or bool(answer_begin)
    rule = None if answer is None or not is_wrapped else _rule_of(answer)
    if answer is not None and rule is None and thought is not None and thought.is_begun:
        return _behind_thought(answer, thought, special_tokens or {})
    if (answer is None and not functions) or (answer is not None and rule is None):
        return answer
    rules = _Rules(special_tokens or {})
    choices = []
    if rule is not None:
        choices.append(f"{rules.text(answer_begin)} answer")
    if functions:
        rules.add_calls(functions, form, is_parallel=is_parallel)
        choices.append("calls")
    begin = "" if thought is None else rules.add_thought(thought)
    start = f"start: {begin}({' | '.join(choices)})"
    return StructuredOutputsParams(grammar="\n".join([start, *rules.lines, rule or ""]))


class _Rules:
    """The rules of a grammar in Lark's notation."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self.lines: list[str] = []
        self._special = special_tokens

    def add_calls(self, functions: Sequence[Json], form: ToolFormat, *, is_parallel: bool) -> None:
        """Add the rule `calls`."""
        several = is_parallel and form.separator is not None
        more = f" ({self.text(form.separator or '')} call){{0,{_MAX_CALLS - 1}}}" if several else ""
        if form.name_key:
            calls = [_call_schema(one, form, place) for one, place in zip(functions, _places(functions), strict=True)]
            schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
            self.lines += [
                f"calls: call{more}",
                f"call: {self.text(form.begin)} tool_json {self.text(form.end)}",
                f"tool_json: {_json_rule(schema)}",
            ]
            return
        names = [f"call_{index}" for index in range(len(functions))]
        self.lines += [f"calls: call{more}", f"call: {' | '.join(names)}"]
        for name, function in zip(names, functions, strict=True):
            begin = self.text(form.begin.replace(_NAME, function["name"]))
            self.lines.append(f"{name}: {begin} {name}_json {self.text(form.end)}")
            self.lines.append(f"{name}_json: {_json_rule(_arguments_schema(function, ''))}")

    def add_thought(self, thought: Thought) -> str:
        """Add the rule `thought`; return the first part of the start rule."""
        begin = "" if thought.is_begun else self.text(thought.begin)
        if any(token in thought.end for token in self._special):
            self.lines.append(f"thought: {begin} THOUGHT {self.text(thought.end)}")
        else:
            self.lines.append(f"thought: {begin} thinking\nthinking[lazy]: THOUGHT {_json(thought.end)}")
        self.lines += ["THOUGHT: /(.|\\n)*/", "GAP: /[ \\n]{0,4}/"]
        return "thought GAP " if thought.is_begun else "(thought GAP)? "

    def text(self, text: str) -> str:
        """Return a text as symbols: special tokens by id, the rest as strings."""
        if not text:
            return ""
        pattern = "|".join(map(re.escape, sorted(self._special, key=len, reverse=True)))
        symbols, at = [], 0
        for found in re.finditer(pattern, text) if pattern else ():
            symbols += [_json(text[at : found.start()]), f"<[{self._special[found.group()]}]>"]
            at = found.end()
        return " ".join(symbol for symbol in [*symbols, _json(text[at:])] if symbol != '""')


def _rule_of(answer: StructuredOutputsParams) -> str | None:
    """Return the rule `answer`; None for a structure that cannot be part of a grammar."""
    choices = answer.choice or []
    if answer.kind == "choice" and len(choices) <= MANY_CHOICES:
        return "answer: " + " | ".join(map(_json, choices))
    if answer.kind in ("choice", "regex"):
        pattern = pattern_of(choices) if answer.regex is None else answer.regex
        return f"answer: ANSWER\nANSWER: /{_REGEX_MARKS.sub(_escaped, pattern)}/"
    if answer.kind == "grammar":  # its names are its own
        return rule_of_grammar("answer", answer.grammar or "")
    if answer.kind not in ("json", "json_object"):
        return None
    schema = json.loads(answer.json) if isinstance(answer.json, str) else {"type": "object"}
    options = _ANSWER_JSON if answer.whitespace_pattern is None else {"whitespace_pattern": answer.whitespace_pattern}
    if answer.disable_any_whitespace:
        options = _COMPACT_JSON
    if answer.disable_additional_properties:
        schema = close_objects(schema)
    return f"answer: {_json_rule(schema, options)}"


def _behind_thought(
    answer: StructuredOutputsParams, thought: Thought, special_tokens: Mapping[str, int]
) -> StructuredOutputsParams:
    """Return a structural tag that follows the rest of a thought. Errors: InvalidRequestError if it cannot."""
    form = None if answer.structural_tag is None else json.loads(str(answer.structural_tag)).get("format")
    if form is None or any(token in thought.end for token in special_tokens):
        raise InvalidRequestError(
            f"structured_outputs of kind {answer.kind} cannot follow reasoning: use json, choice, regex or grammar"
        )
    rest = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": thought.end}
    tag = _json({"format": {"type": "sequence", "elements": [rest, form]}})
    return msgspec.structs.replace(answer, structural_tag=tag)


def _escaped(mark: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(mark.group(), mark.group())


def _places(functions: Sequence[Json]) -> list[str]:
    """Return the position of each function's call in the schema of all calls, as a JSON pointer."""
    return [""] if len(functions) == 1 else [f"/anyOf/{index}" for index in range(len(functions))]


def _call_schema(function: Json, form: ToolFormat, place: str) -> dict[str, Any]:
    arguments = _arguments_schema(function, f"{place}/properties/{form.arguments_key}")
    properties = {form.name_key: {"const": function["name"]}, form.arguments_key: arguments}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _arguments_schema(function: Json, place: str) -> Any:
    """Return the schema of a function's arguments, at this position in a larger schema.

    Arguments that the schema does not name are excluded, unless it sets additionalProperties.
    """
    schema = dict(function.get("parameters") or {})
    schema.setdefault("type", "object")
    if schema["type"] == "object" and not any(one in schema for one in ("anyOf", "oneOf", "allOf", "$ref")):
        schema.setdefault("additionalProperties", False)
        schema.setdefault("properties", {})
    return _moved(schema, place)


def _moved(schema: Any, place: str) -> Any:
    """Return a schema whose internal references are right at this position."""
    if isinstance(schema, Mapping):
        return {
            key: f"#{place}{value[1:]}"
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, place)
            for key, value in schema.items()
        }
    return [_moved(one, place) for one in schema] if isinstance(schema, list) else schema


def _json_rule(schema: Json, options: Json = _CALL_JSON) -> str:
    return f"%json {_json({**spell_dependencies(keep_numbers(drop_annotations(schema))), 'x-guidance': options})}"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
