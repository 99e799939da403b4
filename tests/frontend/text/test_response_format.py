"""Constraints of the OpenAI API's fields, by what their grammars accept."""

import json
from typing import Any

import pytest

from core.grammars.grammars import Grammars
from frontend.text.response_format import (
    ToolFormat,
    after_reasoning,
    constraint_of_response_format,
    constraint_of_tools,
)
from ipc.errors import InvalidRequestError
from ipc.structured_outputs import StructuredOutputsParams
from tests.grammar_vocabulary import EOS, make_grammars, tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]
ADD, STOP = (
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    '<tool_call>\n{"name":"stop","arguments":{}}\n</tool_call>',
)
NAMED = {"type": "function", "function": {"name": "add"}}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return make_grammars()


def accepts(grammars: Grammars, given: StructuredOutputsParams | None, *parts: str | int) -> bool:
    """Parts: text, or the id of a special token."""
    assert given is not None
    matcher = grammars.matcher(given)
    ids = [[part] if isinstance(part, int) else tokenizer().encode(part).ids for part in parts]
    return all(matcher.consume_tokens(one) for one in ids) and matcher.is_accepting()


def test_response_formats(grammars: Grammars) -> None:
    assert constraint_of_response_format(None) is None
    assert constraint_of_response_format({"type": "text"}) is None
    assert accepts(grammars, constraint_of_response_format({"type": "json_object"}), '{"a": 1}')
    schema = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"enum": [1, 2]}}}
    assert accepts(grammars, constraint_of_response_format(schema), "2")
    assert not accepts(grammars, constraint_of_response_format(schema), "3")
    tags = {"structures": [{"begin": "<f>", "schema": {"enum": [1]}, "end": "</f>"}], "triggers": ["<f"]}
    assert accepts(grammars, constraint_of_response_format({"type": "structural_tag", **tags}), "so <f>1</f>")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"type": "xml"}, "got 'xml'"),
        ({}, "got None"),
        ({"type": "json_schema"}, "needs json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": []}}, "needs json_schema.schema"),
    ],
)
def test_bad_response_formats(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        constraint_of_response_format(given)


def test_tool_choices(grammars: Grammars) -> None:
    for free in (None, "none", "auto"):
        assert constraint_of_tools(TOOLS, free, ToolFormat()) is None
    several = constraint_of_tools(TOOLS, "required", ToolFormat())
    one = constraint_of_tools(TOOLS, "required", ToolFormat(), parallel=False)
    named = constraint_of_tools(TOOLS, NAMED, ToolFormat())
    for text, expected in {
        ADD: (True, True, True),
        STOP: (True, True, False),
        f"{ADD}\n{STOP}": (True, False, False),
        "": (False, False, False),
        ADD.replace("1", '"x"'): (False, False, False),
        f"Well. {ADD}": (False, False, False),
    }.items():
        assert tuple(accepts(grammars, given, text) for given in (several, one, named)) == expected, text


def test_marks_that_are_special_tokens_are_tokens(grammars: Grammars) -> None:
    """<eos> stands for a model's mark here: as text it is something else."""
    form = ToolFormat(begin="<eos>[", end="]")
    given = constraint_of_tools(TOOLS, NAMED, form, special_tokens=["<eos>"])
    call = '[{"name":"add","arguments":{"a":1}}]'
    assert accepts(grammars, given, EOS, call)
    assert not accepts(grammars, given, f"<eos>{call}"[1:])


@pytest.mark.parametrize(
    ("tools", "choice", "text"),
    [
        (TOOLS, "sometimes", "got 'sometimes'"),
        ([], "required", r"required \(with tools\)"),
        (TOOLS, {"type": "function", "function": {"name": "sub"}}, "names the tool 'sub'"),
        (TOOLS, {"type": "function"}, "names the tool None"),
        ([{"type": "function"}], "required", "a tool has type function and function.name"),
    ],
)
def test_bad_tools(tools: list[dict[str, Any]], choice: Any, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        constraint_of_tools(tools, choice, ToolFormat())


def test_reasoning_before_an_answer(grammars: Grammars) -> None:
    thought = "Let me see: {a}?\n</think>\n\n"
    answer = after_reasoning(StructuredOutputsParams(json=json.dumps({"enum": [1, 2]})))
    assert accepts(grammars, answer, thought, "2")
    assert not accepts(grammars, answer, "2")
    assert not accepts(grammars, answer, thought, "3")
    assert accepts(grammars, after_reasoning(StructuredOutputsParams(choice=["a", "b"])), thought, "b")
    assert accepts(grammars, after_reasoning(StructuredOutputsParams(json_object=True)), thought, '{"x": []}')
    tools = constraint_of_tools(TOOLS, "required", ToolFormat())
    assert tools is not None
    assert accepts(grammars, after_reasoning(tools), thought, f"{STOP}\n{ADD}")
    with pytest.raises(InvalidRequestError, match="kind regex cannot follow reasoning"):
        after_reasoning(StructuredOutputsParams(regex="a"))
