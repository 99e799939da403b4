"""What a schema says of names, patterns, dates and sizes is obeyed by the compiled grammar, or refused at once."""

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest

from core.grammars.check import _check
from core.grammars.grammars import Grammars
from core.grammars.vocabulary import build_vocabulary
from ipc.errors import InvalidRequestError
from ipc.params.schema_names import MAX_OPTIONAL, _other_names, keep_names
from ipc.params.structured_outputs import StructuredOutputsParams
from tests.core.grammars.test_grammars import accepts
from tests.grammar_vocabulary import EOS, allowed, make_grammars, text_of, tokenizer


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return make_grammars()


def takes(grammars: Grammars, schema: dict[str, Any], text: str) -> bool:
    return accepts(grammars, text, json=json.dumps(schema))


def closed(pattern: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "patternProperties": {pattern: {"type": "boolean"}},
        "additionalProperties": False,
    }


BOOL: dict[str, Any] = {"type": "boolean"}


@pytest.mark.parametrize(
    "schema", [closed("^score$", score=BOOL), closed("^(a|b)$", a=BOOL, b=BOOL), closed("^[ab]$", a=BOOL, b=BOOL)]
)
def test_no_comma_behind_the_last_possible_name(grammars: Grammars, schema: dict[str, Any]) -> None:
    text = json.dumps(dict.fromkeys(schema["properties"], True))
    assert takes(grammars, schema, text)
    matcher = grammars.matcher(StructuredOutputsParams(json=schema))
    assert matcher.consume_tokens(tokenizer().encode(text[:-1]).ids)
    mask = allowed(np.frombuffer(matcher.compute_bitmask(), np.uint32))
    assert not [token for token in mask if token != EOS and "," in text_of([token])]


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            closed("^(a|b)$", a={"enum": [True, 1]}),
            ['{"a": true}', '{"a": true, "b": false}'],
            ['{"a": 1}', '{"a": true, "c": true}'],
        ),
        (closed("^a", a=BOOL), ['{"a": true, "ax": true}'], ['{"a": true, "b": true}']),
        (
            {"type": "object", "patternProperties": {"^[xy]$": {"type": "integer"}}, "additionalProperties": False},
            ["{}", '{"x": 1, "y": 2}'],
            ['{"z": 1}', '{"x": true}'],
        ),
    ],
)
def test_patterns_of_names(grammars: Grammars, schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for text in good:
        jsonschema.validate(json.loads(text), schema)
        assert takes(grammars, schema, text), text
    for text in bad:
        assert not takes(grammars, schema, text), text


OPEN: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "ab": {"type": "integer"}}},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
    {
        "type": "object",
        "properties": {"": {"type": "integer"}, "a.b": {"type": "integer"}},
        "additionalProperties": True,
    },
    {"anyOf": [{"type": "object", "properties": {"a": {"type": "integer"}}}, {"type": "null"}]},
    {"$ref": "#/$defs/one", "$defs": {"one": {"type": "object", "properties": {"a": {"type": "integer"}}}}},
]


@pytest.mark.parametrize("schema", OPEN)
def test_a_declared_name_is_not_written_as_another_one(grammars: Grammars, schema: dict[str, Any]) -> None:
    for text in ('{"\\u0061": "x"}', '{"\\u0061": [1]}', '{"x\\u0061": "x"}'):
        assert not takes(grammars, schema, text), text
    for text in ("{}", '{"b": "x"}', '{"a": 1, "b": "x", "c d": "y"}', '{"b\\n\\"": "x", "é": "y"}', '{"A": "x"}'):
        value = json.loads(text)
        if jsonschema.Draft202012Validator(schema).is_valid(value) and (
            "" not in str(schema) or "a.b" not in str(schema)
        ):
            assert takes(grammars, schema, text), text
    rng, num_whole = random.Random(3), 0
    for _ in range(40):
        matcher, tokens = (
            grammars.matcher(StructuredOutputsParams(json=schema, disable_any_whitespace=True)),
            list[int](),
        )
        for _ in range(60):
            mask = allowed(np.frombuffer(matcher.compute_bitmask(), np.uint32))
            # Mostly what ends a text, so that many are whole.
            ends = [token for token in mask if token == EOS or text_of([token])[:1] in tuple('"}:,1')]
            token = rng.choice(ends if ends and rng.random() < 0.8 else mask)
            if token == EOS:
                num_whole += 1
                jsonschema.validate(json.loads(text_of(tokens)), schema)
                break
            tokens.append(token)
            assert matcher.consume_token(token)
    assert num_whole > 5


def test_all_names_but_these() -> None:
    names = ["a", "ab", "b", "", "abcd", "é", "[x]"]
    rust = _other_names(dict.fromkeys(names))
    python = re.compile(re.sub(r"\\x\{([0-9a-f]+)\}", lambda found: re.escape(chr(int(found[1], 16))), rust))
    letters = ["", *"abcdé[]x\n"]
    for text in {
        one + two + three + four for one in letters for two in letters for three in letters for four in letters
    }:
        assert bool(python.search(text)) == (text not in names), text


def test_what_is_joined_is_left_alone() -> None:
    one = {"type": "object", "properties": {"a": {}}}
    for schema in ({"allOf": [one, one]}, {**one, "$ref": "#/$defs/x"}, {**one, "anyOf": [one]}):
        assert keep_names(schema) == schema
    many = {"type": "object", "properties": {"x" * 5000: {}}}
    assert keep_names(many) == many


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "pattern": "^[a[b]]$"}, ['"b]"', '"[]"'], ['"b"']),
        ({"type": "string", "pattern": "^[a-z--b]$"}, ['"b"', '"-"', '"B"'], ['","']),
        ({"type": "string", "pattern": "^[a&&b]$"}, ['"a"', '"&"'], ['"c"']),
        (
            {"type": "string", "format": "date"},
            ['"2024-02-29"', '"2000-02-29"'],
            ['"2025-02-29"', '"2100-02-29"', '"0000-01-01"'],
        ),
        ({"type": "string", "format": "date-time"}, ['"2024-02-29T10:00:00Z"'], ['"2024-02-29T10:00:60Z"']),
        ({"type": "string", "format": "date", "pattern": "^202"}, ['"2024-02-29"'], ['"2000-02-29"']),
    ],
)
def test_patterns_and_formats(grammars: Grammars, schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    assert [takes(grammars, schema, text) for text in good + bad] == [True] * len(good) + [False] * len(bad)


def large(count: int, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"name_{at}": {"type": "integer"} for at in range(count)}, **more}


def test_more_optional_properties_than_there_is_room_for_are_refused(grammars: Grammars) -> None:
    for schema in (
        large(MAX_OPTIONAL + 1),
        {"type": "array", "items": large(MAX_OPTIONAL + 1, additionalProperties=False)},
    ):
        with pytest.raises(
            InvalidRequestError, match=f"{MAX_OPTIONAL + 1} optional properties is not supported: at most"
        ):
            grammars.matcher(StructuredOutputsParams(json=schema))
    for schema in (large(MAX_OPTIONAL), large(600, required=[f"name_{at}" for at in range(599)])):
        assert takes(
            grammars, schema, json.dumps({f"name_{at}": at for at in range(600 if "required" in schema else 9)})
        )


def test_what_fails_behind_the_first_tokens_is_found_by_the_process_that_checks() -> None:
    vocabulary = build_vocabulary(make_grammars().vocabulary(), in_parts=False)
    one, other = large(300, additionalProperties=False), large(300, additionalProperties=False)
    other["properties"] = {f"x{name}": value for name, value in other["properties"].items()}
    wide = {"anyOf": [one, other]}
    make_grammars().matcher(StructuredOutputsParams(json=wide))  # it compiles
    assert "cannot be used" in _check(vocabulary, StructuredOutputsParams(json=wide))
    assert _check(vocabulary, StructuredOutputsParams(json=large(100))) == ""
    assert _check(vocabulary, StructuredOutputsParams(json_object=True)) == ""
    assert _check(vocabulary, StructuredOutputsParams(regex="a+")) == ""
