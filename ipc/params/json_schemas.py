"""Rewritten JSON schemas: close_objects(); drop_annotations() and spell_dependencies(), which keep the meaning."""

from collections.abc import Callable
from typing import Any

#: The keywords of JSON Schema whose value is a schema, a list of schemas, or schemas by name.
_SCHEMA = ("items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
#: The formats that JSON Schema defines (2020-12, 7.3). Any other format is an annotation.
_FORMATS = (
    *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri"),
    *(
        "uri-reference",
        "iri",
        "iri-reference",
        "uuid",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
        "regex",
    ),
)
#: Keywords with a value that has no effect.
_EMPTY: dict[str, Any] = {"uniqueItems": False, "dependencies": {}, "dependentRequired": {}, "dependentSchemas": {}}

#: Properties of one schema on which others depend: a grammar has two ways for each, and all their combinations.
MAX_DEPENDENCIES = 6


def close_objects(schema: Any) -> Any:
    """Return a copy of the schema, with additionalProperties false in each schema that names properties and does not
    have it.

    A value that is not a schema is returned unchanged.
    """
    return rewrite(schema, _close)


def drop_annotations(schema: Any) -> Any:
    """Return a copy of the schema without formats that JSON Schema does not define, and without keywords that have no
    effect.

    Such formats are from OpenAPI ("password", "byte") or made up, and validators ignore them. A oneOf of different
    strings, each with its own description, means the same as anyOf, which llguidance supports. A value that is not a
    schema is returned unchanged.
    """
    return rewrite(schema, _drop)


def spell_dependencies(schema: Any) -> Any:
    """Return a copy of the schema, in which dependencies between names are written with anyOf, which llguidance
    supports.

    `dependentRequired`, and before it `dependencies` with a list, mean: if a property is present, these others are too.
    So it is absent, or they are required. Dependencies that are schemas are kept, and all of them if there are more
    than MAX_DEPENDENCIES.
    """
    return rewrite(schema, _spell)


def rewrite(schema: Any, change: Callable[[dict[str, Any]], None]) -> Any:
    """Return a copy of the schema, in which `change` has changed each schema, the innermost first."""
    if not isinstance(schema, dict):
        return schema
    copy = dict(schema)
    for name, value in schema.items():
        if name in _BY_NAME and isinstance(value, dict):
            copy[name] = {key: rewrite(part, change) for key, part in value.items()}
        elif name in _LISTS and isinstance(value, list):
            copy[name] = [rewrite(part, change) for part in value]
        elif name in _SCHEMA:
            copy[name] = rewrite(value, change)
    change(copy)
    return copy


def _close(schema: dict[str, Any]) -> None:
    if "properties" in schema or "patternProperties" in schema:
        schema.setdefault("additionalProperties", False)


def _drop(schema: dict[str, Any]) -> None:
    form = schema.get("format")
    if isinstance(form, str) and form not in _FORMATS:
        del schema["format"]
    for name, value in _EMPTY.items():
        if name in schema and type(schema[name]) is type(value) and schema[name] == value:
            del schema[name]
    if "anyOf" not in schema and _are_different_strings(schema.get("oneOf")):
        schema["anyOf"] = schema.pop("oneOf")


def _are_different_strings(branches: Any) -> bool:
    """Return whether each of these schemas allows some strings, and no two allow the same."""
    values: list[Any] = []
    for branch in branches if isinstance(branches, list) else ():
        allowed = [branch["const"]] if isinstance(branch, dict) and "const" in branch else None
        if allowed is None:
            allowed = branch.get("enum") if isinstance(branch, dict) else None
        values += allowed if isinstance(allowed, list) and allowed else [None]
    return bool(values) and all(isinstance(value, str) for value in values) and len(set(values)) == len(values)


def _spell(schema: dict[str, Any]) -> None:
    found: dict[str, list[str]] = {}
    for keyword in ("dependencies", "dependentRequired"):
        value = schema.get(keyword)
        if isinstance(value, dict):
            found |= {name: found.get(name, []) + names for name, names in value.items() if _are_names(names)}
    others, rules = schema.get("allOf", []), [(name, names) for name, names in found.items() if names]
    if not found or len(rules) > MAX_DEPENDENCIES or not isinstance(others, list):
        return
    for keyword in ("dependencies", "dependentRequired"):
        value = schema.pop(keyword, None)
        left = {name: one for name, one in value.items() if not _are_names(one)} if isinstance(value, dict) else value
        if left:
            schema[keyword] = left
    if rules:
        ways = [[{"properties": {name: False}}, {"required": names}] for name, names in rules]
        schema["allOf"] = [*others, *({"anyOf": way} for way in ways)]


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
