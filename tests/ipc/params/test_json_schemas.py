"""Schemas are rewritten where a schema stands, and nowhere else."""

from typing import Any

import pytest

from ipc.params.json_schemas import MAX_DEPENDENCIES, close_objects, drop_annotations, spell_dependencies


def test_close_objects() -> None:
    given = {
        "properties": {
            "properties": {"type": "object", "properties": {"x": {}}},
            "open": {"additionalProperties": True},
        },
        "anyOf": [{"patternProperties": {"a": {}}}, True],
        "items": [{"properties": {}}],
        "enum": [{"properties": {}}],
        "$defs": {"d": {"properties": {}, "additionalProperties": {"properties": {}}}},
    }
    closed = {"additionalProperties": False}
    assert (
        close_objects(given)
        == {
            "properties": {
                "properties": {"type": "object", "properties": {"x": {}}} | closed,
                "open": {"additionalProperties": True},
            },
            "anyOf": [{"patternProperties": {"a": {}}} | closed, True],
            "items": [{"properties": {}} | closed],
            "enum": [{"properties": {}}],
            "$defs": {"d": {"properties": {}, "additionalProperties": {"properties": {}} | closed}},
        }
        | closed
    )


@pytest.mark.parametrize(
    ("given", "dropped"),
    [
        ({"type": "string", "format": "binary"}, {"type": "string"}),
        (
            {"type": "string", "format": "json-pointer"},
            {"type": "string", "format": "json-pointer"},
        ),  # JSON Schema's own
        ({"items": [{"format": "byte"}], "anyOf": [{"format": "x"}, True]}, {"items": [{}], "anyOf": [{}, True]}),
        ({"properties": {"format": {"type": "string"}}}, {"properties": {"format": {"type": "string"}}}),
        ({"properties": {"format": {"format": "url"}}}, {"properties": {"format": {}}}),
        ({"const": {"format": "x"}, "enum": [{"uniqueItems": False}]},) * 2,  # values, not schemas
        ({"uniqueItems": False, "dependencies": {}, "dependentRequired": {}}, {}),
        ({"uniqueItems": True, "dependencies": {"a": ["b"]}},) * 2,
        ({"uniqueItems": 0, "format": 3},) * 2,  # no schema: refused as it is
        (
            {"oneOf": [{"const": "a", "title": "A"}, {"enum": ["b"]}]},
            {"anyOf": [{"const": "a", "title": "A"}, {"enum": ["b"]}]},
        ),
        ({"oneOf": [{"const": "a"}, {"enum": ["b", "a"]}]},) * 2,
        ({"oneOf": [{"const": "a"}, {"const": 1}]},) * 2,
        ({"oneOf": [{"const": "a"}, {"type": "string"}]},) * 2,
        ({"oneOf": [{"const": "a"}], "anyOf": [{"const": "b"}]},) * 2,
        ({"oneOf": [{"enum": []}, True]},) * 2,
        ({"oneOf": "x"},) * 2,
        (True, True),
    ],
)
def test_drop_annotations(given: Any, dropped: Any) -> None:
    before = repr(given)
    assert drop_annotations(given) == dropped
    assert repr(given) == before


def either(name: str, *names: str) -> dict[str, Any]:
    return {"anyOf": [{"properties": {name: False}}, {"required": list(names)}]}


@pytest.mark.parametrize(
    ("given", "spelled"),
    [
        ({"dependencies": {"a": ["b", "c"]}}, {"allOf": [either("a", "b", "c")]}),
        ({"dependentRequired": {"a": ["b"]}, "dependencies": {"a": ["c"]}}, {"allOf": [either("a", "c", "b")]}),
        ({"dependencies": {"a": []}}, {}),
        (
            {"allOf": [{}], "dependencies": {"a": ["b"], "b": {"required": ["c"]}}},
            {"allOf": [{}, either("a", "b")], "dependencies": {"b": {"required": ["c"]}}},
        ),
        ({"items": {"dependencies": {"a": ["b"]}}}, {"items": {"allOf": [either("a", "b")]}}),
        ({"properties": {"dependencies": {"type": "string"}}},) * 2,
        ({"dependencies": {str(n): ["b"] for n in range(MAX_DEPENDENCIES + 1)}},) * 2,  # refused as it is
        ({"dependencies": {"a": ["b", 3], "b": "c"}},) * 2,
        ({"dependencies": ["a"], "dependentRequired": 3},) * 2,
        ({"dependencies": {"a": ["b"]}, "allOf": 3},) * 2,
    ],
)
def test_spell_dependencies(given: Any, spelled: Any) -> None:
    before = repr(given)
    assert spell_dependencies(given) == spelled
    assert repr(given) == before
