"""Schemas are rewritten where a schema stands, and nowhere else."""

from typing import Any

import pytest

from ipc.json_schemas import close_objects, drop_annotations


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
        (True, True),
    ],
)
def test_drop_annotations(given: Any, dropped: Any) -> None:
    before = repr(given)
    assert drop_annotations(given) == dropped
    assert repr(given) == before
