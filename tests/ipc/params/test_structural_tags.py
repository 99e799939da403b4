"""The formats of a structural tag: what is read, and that each error names its place."""

import json
from typing import Any

import pytest

from ipc.errors import InvalidRequestError, UnsupportedParameterError
from ipc.params.structural_tags import (
    MAX_COUNT,
    MAX_ELEMENTS,
    MAX_FORMATS,
    MAX_MARK_CHARS,
    AnyText,
    ConstString,
    Repeat,
    Sequence,
    Tag,
    TriggeredTags,
    read_format,
)
from ipc.params.structured_outputs import MAX_SCHEMA_DEPTH, StructuredOutputsParams, read_structural_tag

Json = dict[str, Any]

ANY: Json = {"type": "any_text"}
NO: Json = {"type": "const_string", "value": "no"}


def tag(begin: Any, content: Any = ANY, end: Any = ">") -> Json:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def within(depth: int, node: Json) -> Json:
    for _ in range(depth):
        node = {"type": "star", "content": node}
    return node


def test_what_is_read() -> None:
    inner = {
        "begin": "<f=x",
        "content": {"type": "json_schema", "json_schema": True},
        "end": ["", "a"],
    }  # as clients may
    node = {"type": "triggered_tags", "triggers": ["<f="], "tags": [inner]}
    given = StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": node})
    assert isinstance(given.structural_tag, str)
    read = read_structural_tag(given.structural_tag)
    assert isinstance(read, TriggeredTags)
    assert (read.triggers, read.at_least_one, read.excludes, read.tags[0].ends) == (["<f="], False, [], ("a",))
    assert read_format({"format": {"type": "sequence", "elements": [NO, ANY]}}) == Sequence(
        [ConstString("no"), AnyText()]
    )
    assert read_format({"format": {"type": "repeat", "min": 2, "max": -1, "content": NO}}) == Repeat(
        ConstString("no"), 2, -1
    )
    assert read_format({"format": tag("")}) == Tag("", AnyText(), ">")


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (None, "format: Expected `object`, got `null`"),
        ([], "format: Expected `object`, got `array`"),
        ({}, "format: Object missing required field `type`"),
        ({"type": "text"}, "format.type: Invalid value 'text'"),
        ({"type": ["tag"]}, "format.type: Expected `str`"),
        ({"type": "const_string"}, "format: Object missing required field `value`"),
        ({"type": "sequence", "elements": []}, "format.elements: Expected `array` of length >= 1"),
        (
            {"type": "sequence", "elements": [NO, tag("<", {"type": "any_text", "x": 1})]},
            r"format.elements\[1\].content: .* `x`",
        ),
        ({"type": "any_text", "excludes": ["a", ""]}, r"format.excludes\[1\]: Expected `str` of length >= 1"),
        ({"type": "any_text", "excludes": ["a" * (MAX_MARK_CHARS + 1)]}, r"format.excludes\[0\]: Expected `str`"),
        ({"type": "any_text", "max_chars": MAX_COUNT + 1}, "format.max_chars: Expected `int` <= "),
        (tag("<", ANY, []), "format.end: Expected `array` of length >= 1"),
        (tag("<", ANY, 3), "format.end: Expected `str | array`"),
        ({"type": "json_schema", "json_schema": "{}"}, "format.json_schema: Expected `bool | object`"),
        ({"type": "regex", "pattern": ""}, "format.pattern: Expected `str` of length >= 1"),
        ({"type": "or", "elements": [NO] * (MAX_ELEMENTS + 1)}, "format.elements: Expected `array` of length <= "),
        (
            {"type": "triggered_tags", "triggers": [""], "tags": [tag("a")]},
            r"format.triggers\[0\]: Expected `str` of length",
        ),
        ({"type": "triggered_tags", "triggers": ["<"], "tags": []}, "format.tags: Expected `array` of length >= 1"),
        (
            {"type": "triggered_tags", "triggers": ["<"], "tags": [tag("<"), tag("a")]},
            r"format.tags\[1\].begin: 0 triggers",
        ),
        (
            {"type": "triggered_tags", "triggers": ["<", "<a"], "tags": [tag("<a")]},
            r"format.tags\[0\].begin: 2 triggers",
        ),
        (
            {"type": "triggered_tags", "triggers": ["<a>"], "tags": [tag("<a>")], "excludes": [">"]},
            r"triggers\[0\]: '<a>' contains",
        ),
        (
            tag("(", {"type": "triggered_tags", "triggers": ["<a)"], "tags": [tag("<a)")]}, ")"),
            r"content.triggers\[0\]: .* contains",
        ),
        ({"type": "dispatch", "rules": [["a", NO], ["ba", NO]]}, r"format.rules\[1\]: 'ba' contains 'a'"),
        ({"type": "dispatch", "rules": [["a", {"type": "tag"}]]}, r"format.rules\[0\]\[1\]: Object missing"),
        ({"type": "repeat", "min": 3, "max": 2, "content": NO}, "format: min 3 is above max 2"),
        ({"type": "repeat", "min": -1, "max": 2, "content": NO}, "format.min: Expected `int` >= 0"),
        (
            {"type": "or", "elements": [{"type": "or", "elements": [NO] * 250} for _ in range(5)]},
            f"more than {MAX_FORMATS}",
        ),
    ],
)
def test_refusals_name_their_place(node: Any, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"structural_tag.*{text}"):
        StructuredOutputsParams(structural_tag=json.dumps({"type": "structural_tag", "format": node}))


@pytest.mark.parametrize(
    ("node", "text"),
    [
        ({"type": "qwen_xml_parameter", "json_schema": {}}, "format: the format qwen_xml_parameter"),
        (tag({"type": "token", "token": 3}), "format.begin: the format token"),
        ({"type": "sequence", "elements": [{"type": "any_tokens"}]}, r"format.elements\[0\]: the format any_tokens"),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "format.style"),
        (tag("<", {"type": "json_schema", "json_schema": {}, "any_order": True}), "format.content.any_order"),
        ({"type": "json_schema", "json_schema": {}, "max_whitespace_cnt": 2}, "format.max_whitespace_cnt"),
        ({"type": "any_text", "max_tokens": 0}, "format.max_tokens"),
    ],
)
def test_what_the_engine_does_not_do_is_refused_by_its_name(node: Json, text: str) -> None:
    with pytest.raises(UnsupportedParameterError, match=f"{text} is not supported by this version"):
        StructuredOutputsParams(structural_tag={"format": node})


def test_the_top_of_a_tag() -> None:
    assert isinstance(read_format({"format": ANY}), AnyText)
    with pytest.raises(InvalidRequestError, match="structural_tag: type: Invalid enum value 'tag'"):
        StructuredOutputsParams(structural_tag={"type": "tag", "format": ANY})
    with pytest.raises(InvalidRequestError, match="structural_tag: Object contains unknown field `triggers`"):
        StructuredOutputsParams(structural_tag={"format": ANY, "triggers": ["<"]})


def test_the_deepest_tag_that_is_allowed() -> None:
    assert StructuredOutputsParams(structural_tag={"format": within(MAX_SCHEMA_DEPTH - 2, NO)})
    for node in (within(MAX_SCHEMA_DEPTH - 1, NO), within(900, NO)):
        with pytest.raises(InvalidRequestError, match=f"more than {MAX_SCHEMA_DEPTH} deep"):
            StructuredOutputsParams(structural_tag={"format": node})


def test_a_schema_s_own_words_are_not_taken_for_formats() -> None:
    schema = {"properties": {"type": {"const": "token"}, "style": {"type": "token"}}, "type": "object"}
    assert StructuredOutputsParams(structural_tag={"format": {"type": "json_schema", "json_schema": schema}})
