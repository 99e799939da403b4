"""Forty JSON schemas with the features that real ones have, written for these tests. Their texts are bounded, so that
random tokens come to an end."""

from typing import Any

TEXT: dict[str, Any] = {"type": "string", "maxLength": 8}
NUMBER: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 999}


def thing(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    """A closed object; required: None = all."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


SCHEMAS: dict[str, dict[str, Any]] = {
    "string": TEXT,
    "min-and-max-length": {"type": "string", "minLength": 3, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    "pattern-inside": {"type": "string", "pattern": "^a[bc]{1,3}d?$"},
    "date": {"type": "string", "format": "date"},
    "date-time": {"type": "string", "format": "date-time"},
    "time": {"type": "string", "format": "time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "integer": {"type": "integer", "minimum": -50, "maximum": 50},
    "exclusive": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 4},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "multiple": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 10},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "several-types": {"type": ["boolean", "null"]},
    "enum": {"enum": ["red", "green", 3, None, {"a": [1]}, True]},
    "const": {"const": {"version": 2, "name": "é☃"}},
    "array": {"type": "array", "items": NUMBER, "maxItems": 4},
    "array-of-at-least": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    "tuple": {"type": "array", "prefixItems": [NUMBER, {"type": "boolean"}], "items": False, "minItems": 2},
    "nested-arrays": {"type": "array", "maxItems": 2, "items": {"type": "array", "items": NUMBER, "maxItems": 2}},
    "person": thing(name=TEXT, age=NUMBER),
    "optional": thing(["a"], a=NUMBER, b=NUMBER, c={"type": "boolean"}),
    "nothing-required": thing([], a={"type": "boolean"}, b={"type": "null"}),
    "empty": thing(),
    "nested": thing(outer=thing(inner=thing(value=NUMBER))),
    "array-of-objects": {"type": "array", "items": thing(id=NUMBER, ok={"type": "boolean"}), "maxItems": 2},
    "pattern-properties": {"type": "object", "patternProperties": {"^[a-c]$": NUMBER}, "additionalProperties": False},
    "any-of": {"anyOf": [thing(kind={"const": "a"}, x=NUMBER), thing(kind={"const": "b"}, y={"type": "boolean"})]},
    "one-of-constants": {"anyOf": [{"const": 1}, {"const": "one"}, {"type": "null"}]},
    "nullable": thing(value={"anyOf": [NUMBER, {"type": "null"}]}),
    "all-of": {"allOf": [thing(a=NUMBER), {"type": "object", "properties": {"a": {"maximum": 9}}}]},
    "definitions": {"$defs": {"point": thing(x=NUMBER, y=NUMBER)}, **thing(a={"$ref": "#/$defs/point"})},
    "recursive": {
        "$defs": {"tree": thing(["v"], v={"type": "boolean"}, left={"$ref": "#/$defs/tree"})},
        "$ref": "#/$defs/tree",
    },
    "described": {"title": "A title", "description": 'A "text"', "default": 1, "examples": [2], **NUMBER},
    "keys-to-escape": thing(**{'a "b"\n': NUMBER, "ü/\\": {"type": "boolean"}}),
    "function-call": thing(name={"const": "get_weather"}, arguments=thing(city=TEXT, unit={"enum": ["C", "F"]})),
    "many-fields": thing(**{f"field_{number}": {"type": "boolean"} for number in range(12)}),
    "invoice": thing(
        ["number", "lines"],
        number={"type": "string", "pattern": "^INV-[0-9]{3}$"},
        lines={"type": "array", "minItems": 1, "maxItems": 2, "items": thing(sku=TEXT, count=NUMBER)},
        paid={"type": "boolean"},
        note={"anyOf": [TEXT, {"type": "null"}]},
    ),
}
