"""The formats in which models write reasoning and calls, as data, by vLLM's names for their parsers."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from frontend.calls.delta import Sink
from frontend.calls.gemma_calls import read_gemma4_calls, read_gemma_calls
from frontend.calls.json_calls import Tools, read_json_calls, read_named_calls
from frontend.calls.python_calls import MAX_LIST, read_python_calls
from frontend.calls.source import MAX_KEPT, NotACallError, Reading, Source

# Calls of Qwen3-Coder and Qwen 3.5: `<function=NAME><parameter=KEY>value</parameter>...</function>`.
#
# A value is text without quotes. It is a string if the tool's schema says so or if it is not JSON; otherwise it is
# JSON. Each argument is sent when it is complete.


_NAME = re.compile(r"[^<>\s]+")
_END = "</parameter>"


def read_xml_calls(source: Source, sink: Sink, tools: Tools, end: str) -> Reading[None]:
    """Read one call and the mark `end` after it. Errors: NotACallError."""
    yield from source.skip_space()
    if not (yield from source.take("<function=")):
        raise NotACallError
    name = yield from source.collect(_NAME)
    if not name or not (yield from source.take(">")):
        raise NotACallError
    source.release()
    sink.begin_call(name)
    sink.arguments("{")
    types = _types((tools or {}).get(name))
    num_read = 0
    while True:
        yield from source.skip_space()
        if not (yield from source.take("<parameter=")):
            break
        key = yield from source.collect(_NAME)
        yield from source.take(">")
        parts: list[str] = []
        ended = yield from source.until([_END], parts.append)
        if not ended:
            return  # cut
        value = "".join(parts).removeprefix("\n").removesuffix("\n")
        begin = ", " if num_read else ""
        sink.arguments(f"{begin}{json.dumps(key)}: {_as_json(value, types.get(key))}")
        num_read += 1
    sink.arguments("}")
    yield from source.take("</function>")
    yield from source.skip_space()
    yield from source.take(end)


def _types(schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the type of each argument that the schema names."""
    properties = (schema or {}).get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {key: one.get("type") for key, one in properties.items() if isinstance(one, Mapping)}


def _as_json(value: str, kind: Any) -> str:
    if kind != "string":
        try:
            return json.dumps(json.loads(value), ensure_ascii=False, allow_nan=False)  # NaN is Python's, not JSON
        except (ValueError, RecursionError):
            pass
        if value.lower() in ("true", "false"):
            return value.lower()
    return json.dumps(value, ensure_ascii=False)


class ToolFormat(NamedTuple):
    """The form of a call in a grammar: begin, a JSON object with the tool's name and its arguments, end.

    name_key "": the JSON is only the arguments, and {name} in `begin` is the tool's name. separator: between two calls;
    None = there is only one.
    """

    begin: str = "<tool_call>\n"
    end: str = "\n</tool_call>"
    name_key: str = "name"
    arguments_key: str = "arguments"
    separator: str | None = "\n"


class CallFormat(NamedTuple):
    """How a model writes calls. begins, end: the marks around them; end "" = none.

    is_bare: an answer may also begin with a call, without a mark. needs_tools: text is a call only if a tool has its
    name, or the reader needs the schemas. forced: form of calls if a grammar forces them. id_length: of a call's id,
    letters and digits; None = any.
    """

    name: str
    begins: tuple[str, ...]
    end: str
    read: Callable[[Source, Sink, Tools, str], Reading[None]]
    forced: ToolFormat | None = None
    is_bare: bool = False
    needs_tools: bool = False
    id_length: int | None = None
    most_kept: int = MAX_KEPT


class AnswerForm(NamedTuple):
    """How a model writes answers. reasoning: the marks around it; None = reasoning is not separated."""

    calls: CallFormat | None = None
    reasoning: tuple[str, str] | None = None
    is_harmony: bool = False


HERMES_TOOLS = ToolFormat()
HARMONY_TOOLS = ToolFormat(
    "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", "", name_key="", separator=None
)
HARMONY_ANSWER = "<|channel|>final<|message|>"
HARMONY_THOUGHT = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
HERMES = CallFormat("hermes", ("<tool_call>",), "</tool_call>", read_json_calls, HERMES_TOOLS)
_LLAMA = CallFormat(
    "llama3_json",
    ("<|python_tag|>",),
    "",
    read_json_calls,
    ToolFormat("", "", "name", "parameters", "; "),
    is_bare=True,
)
_MISTRAL = CallFormat(
    "mistral",
    ("[TOOL_CALLS]",),
    "",
    read_named_calls,
    ToolFormat("[TOOL_CALLS][", "]", separator=""),
    id_length=9,
)
_PYTHON = CallFormat(
    "pythonic", ("```tool_code",), "```", read_python_calls, is_bare=True, needs_tools=True, most_kept=MAX_LIST
)
_FUNCTION_GEMMA = CallFormat("functiongemma", ("<start_function_call>",), "<end_function_call>", read_gemma_calls)
_GEMMA4 = CallFormat("gemma4", ("<|tool_call>",), "<tool_call|>", read_gemma4_calls)
_XML = CallFormat("qwen3_coder", ("<tool_call>",), "</tool_call>", read_xml_calls, needs_tools=True)

HARMONY = "openai"
#: Name of vLLM's --tool-call-parser -> the format.
CALL_FORMATS = {
    **{one.name: one for one in (HERMES, _LLAMA, _MISTRAL, _PYTHON, _FUNCTION_GEMMA, _GEMMA4, _XML)},
    **dict.fromkeys(("qwen", "qwen25", "qwen3"), HERMES),
    **dict.fromkeys(("llama3", "llama4_json"), _LLAMA),
    **dict.fromkeys(("gemma", "gemma3", "llama4_pythonic"), _PYTHON),
    "qwen3_xml": _XML,
}
_THINK = ("<think>", "</think>")
#: Name of vLLM's --reasoning-parser -> the marks.
REASONING_FORMATS = {
    **dict.fromkeys(("qwen3", "deepseek_r1", "deepseek_v3", "glm45", "minimax_m2", "think"), _THINK),
    "mistral": ("[THINK]", "[/THINK]"),
    "gemma4": ("<|channel>thought", "<channel|>"),
    "granite": ("<reasoning>", "</reasoning>"),
}
HARMONY_NAMES = (HARMONY, "openai_gptoss", "gptoss", "harmony")
