"""The grammar of a chat's answer, by what it accepts; and what it accepts is what the scanner reads."""

import json
import re
from typing import Any

import pytest

from core.grammars.grammars import Grammars
from frontend.calls.constraint import Thought, constrain, forced_functions, read_allowed, read_functions
from frontend.calls.delta import fold
from frontend.calls.formats import CALL_FORMATS, HARMONY_TOOLS, HERMES, AnswerForm, ToolFormat
from frontend.calls.scanner import Scanner
from ipc.errors import InvalidRequestError
from ipc.params.structured_outputs import StructuredOutputsParams
from tests.grammar_vocabulary import EOS, accepts, make_grammars, tokenizer

ADD_SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/number"}}, "required": ["a"]}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {**ADD_SCHEMA, "$defs": {"number": {"type": "integer"}}}},
    },
    {"type": "function", "function": {"name": "stop"}},
]
FUNCTIONS = read_functions(TOOLS)
ALL = list(FUNCTIONS.values())
ADD, STOP = '{"name": "add", "arguments": {"a": 1}}', '{"name": "stop", "arguments": {}}'
NAMED = {"type": "function", "function": {"name": "add"}}
ENUM = StructuredOutputsParams(json=json.dumps({"enum": [1, 2]}))
TAG = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]}
THINK = Thought("<think>", "</think>")


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return make_grammars()


def marked(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


def test_tool_choices() -> None:
    for free in (None, "none", "auto"):
        assert forced_functions(FUNCTIONS, free) is None
    assert forced_functions(FUNCTIONS, "required") == ALL
    assert forced_functions(FUNCTIONS, NAMED) == ALL[:1]


def test_allowed_tools() -> None:
    named = [{"type": "function", "function": {"name": "add"}}]
    for choice in (
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]},
    ):
        assert read_allowed(TOOLS, choice) == (TOOLS[:1], "required")
    assert read_allowed(TOOLS, {"type": "allowed_tools", "tools": named}) == (TOOLS[:1], "auto")
    assert read_allowed(TOOLS, NAMED) == (TOOLS, NAMED)
    for wrong in ({"mode": "any", "tools": named}, {"tools": []}, {"tools": [{"name": "fly"}]}, {"tools": [3]}, {}):
        with pytest.raises(InvalidRequestError, match="tool_choice"):
            read_allowed(TOOLS, {"type": "allowed_tools", **wrong})


def test_calls(grammars: Grammars) -> None:
    several, one = constrain(None, ALL), constrain(None, ALL, is_parallel=False)
    named = constrain(None, ALL[:1], is_parallel=False)
    for text, expected in {
        marked(ADD): (True, True, True),
        marked(STOP): (True, True, False),
        f"{marked(ADD)}\n{marked(STOP)}": (True, False, False),
        "": (False, False, False),
        marked(ADD.replace("1", '"x"')): (False, False, False),
        marked(ADD.replace("1", '1, "b": 2')): (False, False, False),
        f"Well. {marked(ADD)}": (False, False, False),
    }.items():
        assert tuple(accepts(grammars, given, text) for given in (several, one, named)) == expected, text


@pytest.mark.parametrize(("name", "text"), [
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}}; {"name": "stop", "parameters": {}}'),
    ("mistral", f"[TOOL_CALLS][{ADD}][TOOL_CALLS][{STOP}]"),
    ("hermes", f"{marked(ADD)}\n{marked(STOP)}"),
])  # fmt: skip
def test_what_a_grammar_forces_is_what_the_scanner_reads(grammars: Grammars, name: str, text: str) -> None:
    form = CALL_FORMATS[name]
    assert form.forced is not None
    assert accepts(grammars, constrain(None, ALL, form.forced), text)
    scanner = Scanner(AnswerForm(form), {"add": {}, "stop": {}})
    calls = fold([*scanner.feed(text), *scanner.finish()]).calls
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("add", {"a": 1}), ("stop", {})]


def test_harmony(grammars: Grammars) -> None:
    thought = Thought("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
    final = "<|channel|>final<|message|>"
    given = constrain(ENUM, ALL, HARMONY_TOOLS, thought=thought, answer_begin=final)
    call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
    thinking = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for text, expected in {
        call: True,
        thinking + call: True,
        f"{final}2": True,
        f"{thinking}{final}3": False,
        call.replace("add", "stop"): False,
        f"{call}{call}": False,
    }.items():
        assert accepts(grammars, given, text) == expected, text


def test_marks_that_are_special_tokens_are_tokens(grammars: Grammars) -> None:
    """<eos> stands for a model's mark here: as text it is something else."""
    form = ToolFormat(begin="<eos>[", end="]")
    given = constrain(None, ALL[:1], form, special_tokens={"<eos>": tokenizer().token_to_id("<eos>")})
    assert accepts(grammars, given, EOS, f"[{ADD}]")
    assert not accepts(grammars, given, f"<eos>[{ADD}]"[1:])


@pytest.mark.parametrize(
    ("tools", "choice", "text"),
    [
        (TOOLS, "sometimes", "got 'sometimes'"),
        ([], "required", r"required, but there are no tools"),
        (TOOLS, {"type": "function", "function": {"name": "sub"}}, "names the tool 'sub'"),
        (TOOLS, {"type": "function"}, "names the tool None"),
        ([{"type": "function"}], "required", "a tool must have type function and a function.name"),
        ([{"function": {"name": "f", "parameters": []}}], "required", "parameters must be a JSON schema"),
    ],
)
def test_bad_tools(tools: list[dict[str, Any]], choice: Any, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        forced_functions(read_functions(tools), choice)


def test_reasoning_before_an_answer(grammars: Grammars) -> None:
    thinking = "Let me see: {a}?\n</think>\n\n"
    begun = THINK._replace(is_begun=True)
    answer = constrain(ENUM, thought=begun)
    assert accepts(grammars, answer, thinking, "2")
    assert not accepts(grammars, answer, "2")
    assert not accepts(grammars, answer, thinking, "3")
    free = constrain(ENUM, thought=THINK)
    assert accepts(grammars, free, "<think>", thinking, "2")
    assert accepts(grammars, free, "2")
    assert not accepts(grammars, free, thinking, "2")
    assert accepts(grammars, constrain(StructuredOutputsParams(choice=["a", "b"]), thought=begun), thinking, "b")
    assert accepts(grammars, constrain(None, ALL, thought=begun), thinking, marked(STOP))
    tag = StructuredOutputsParams(structural_tag=json.dumps(TAG))
    assert constrain(tag, ALL, thought=THINK) is tag
    with pytest.raises(InvalidRequestError, match="kind structural_tag cannot follow reasoning"):
        constrain(tag, thought=begun)


LARK = 'start: (answer | "{" THOUGHT "}")+ // }\nanswer: "a" | "b"\nTHOUGHT: /[0-9]{2}/\n%ignore " "'
GBNF = '# a comment\nroot ::= (answer | "{" THOUGHT "}")+\nanswer ::= " "* [ab]\nTHOUGHT ::= " "* [0-9] [0-9] " "*'


@pytest.mark.parametrize("text", [LARK, GBNF])
def test_a_grammar_behind_reasoning_is_what_it_is_alone(grammars: Grammars, text: str) -> None:
    """Also where its rules have the names of those around it, and its strings and comments have braces."""
    given = StructuredOutputsParams(grammar=text)
    begun, free = (constrain(given, ALL, thought=THINK._replace(is_begun=one)) for one in (True, False))
    for answer, wanted in (
        ("a", True),
        ("a b{12}a", True),
        ("{ 12 }", True),
        ("{1 2}", False),
        ("", False),
        ("c", False),
    ):
        assert accepts(grammars, given, answer) == wanted, answer
        assert accepts(grammars, begun, "Hm: b}\n</think>\n", answer) == wanted, answer
        assert accepts(grammars, free, "<think>", "Hm.</think>", answer) == accepts(grammars, free, answer) == wanted
    assert accepts(grammars, begun, "Hm.</think>", marked(STOP))
    assert not accepts(grammars, begun, "a")
    assert constrain(given) is given


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('start: "a" }', "Expected value"),
        ('begin: "a"', "no start rule"),
        ("start: b", "unknown name"),
        ("root ::= missing", "grammar is not GBNF: Rule 'missing' not found"),
    ],
)
def test_a_grammar_behind_reasoning_that_is_wrong_is_refused(grammars: Grammars, text: str, why: str) -> None:
    given = constrain(StructuredOutputsParams(grammar=text), thought=THINK._replace(is_begun=True))
    assert given is not None
    with pytest.raises(InvalidRequestError, match=why):
        grammars.matcher(given)


def test_a_structural_tag_behind_reasoning(grammars: Grammars) -> None:
    """Where the prompt has begun it and its end is text; else the tag stands alone."""
    call = {"type": "tag", "begin": "<c>", "content": {"type": "json_schema", "json_schema": {"enum": [1]}}, "end": "<"}
    given = StructuredOutputsParams(structural_tag={"format": call}, disable_any_whitespace=True)
    begun = THINK._replace(is_begun=True)
    behind = constrain(given, ALL, thought=begun)
    assert behind is not None
    assert behind.disable_any_whitespace
    assert accepts(grammars, behind, "<c>1?</think>", "<c>1<")
    assert not accepts(grammars, behind, "<c>1<")
    assert constrain(given, ALL, thought=THINK) is given
    old = {"structures": [{"begin": "<c>", "schema": {}, "end": "<"}], "triggers": ["<c"]}
    for answer, special in ((StructuredOutputsParams(structural_tag=old), {}), (given, {"</think>": 7})):
        with pytest.raises(InvalidRequestError, match="kind structural_tag cannot follow reasoning"):
            constrain(answer, ALL, thought=begun, special_tokens=special)


@pytest.mark.parametrize("regex", ["a/b|c", r"a\/b|c", r"\[/]?|c", "a\nb|c", r"a\nb|c", r"\\/|c", "/|c"])
def test_a_regex_behind_reasoning_is_what_it_is_alone(grammars: Grammars, regex: str) -> None:
    given = StructuredOutputsParams(regex=regex)
    behind = constrain(given, thought=THINK._replace(is_begun=True))
    for text in ("a/b", "a\nb", "[", "[/", "\\/", "/", "c", "a", ""):
        wanted = re.fullmatch(regex, text) is not None
        assert accepts(grammars, given, text) == accepts(grammars, behind, "Hm.\n</think>", text) == wanted, text


def test_options_of_json_hold_behind_reasoning(grammars: Grammars) -> None:
    begun, options = THINK._replace(is_begun=True), {"disable_additional_properties": True}
    compact = StructuredOutputsParams(json={"properties": {"a": {}}}, disable_any_whitespace=True, **options)
    spaced = StructuredOutputsParams(json_object=True, whitespace_pattern="_?")
    for given, right, wrong in (
        (compact, '{"a":1}', ['{"a": 1}', '{"a":1,"b":2}']),
        (spaced, '{_"b"_:_2}', ['{__"b":2}', '{"b": 2}']),
    ):
        behind = constrain(given, ALL, thought=begun)
        assert accepts(grammars, behind, "Hm.\n</think>", right)
        assert not any(accepts(grammars, behind, "Hm.\n</think>", text) for text in wrong)


def test_many_choices_and_large_numbers_behind_reasoning(grammars: Grammars) -> None:
    begun = THINK._replace(is_begun=True)
    texts = ["a/b", "a.b\n", *(f"no{index}" for index in range(4000))]
    behind = constrain(StructuredOutputsParams(choice=texts), ALL, thought=begun)
    assert all(accepts(grammars, behind, "Hm.\n</think>", text) for text in (*texts[:3], texts[-1]))
    assert not any(accepts(grammars, behind, "Hm.\n</think>", text) for text in ("axb\n", "no4000", ""))
    with pytest.raises(InvalidRequestError, match="123456789012345678 is not supported"):
        constrain(StructuredOutputsParams(json={"const": 123456789012345678}), ALL, thought=begun)


def test_an_answer_of_a_form_or_calls(grammars: Grammars) -> None:
    either = constrain(ENUM, ALL, HERMES.forced or ToolFormat())
    assert accepts(grammars, either, "2")
    assert accepts(grammars, either, marked(ADD))
    assert not accepts(grammars, either, "3")
    assert constrain(ENUM) is ENUM
    assert constrain(None) is None
