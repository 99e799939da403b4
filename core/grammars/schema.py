"""close_objects(): a JSON schema whose objects have no other properties than those that it names."""

from typing import Any

#: The keywords of JSON Schema whose value is a schema, a list of schemas, or schemas by name.
_SCHEMA = ("items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def close_objects(schema: Any) -> Any:
    """Return a copy of the schema, with additionalProperties false where a schema names properties and lacks it.

    A value that is no schema is returned as it is.
    """
    if not isinstance(schema, dict):
        return schema
    copy = dict(schema)
    for name, value in schema.items():
        if name in _BY_NAME and isinstance(value, dict):
            copy[name] = {key: close_objects(part) for key, part in value.items()}
        elif name in _LISTS and isinstance(value, list):
            copy[name] = [close_objects(part) for part in value]
        elif name in _SCHEMA:
            copy[name] = close_objects(value)
    if "properties" in copy or "patternProperties" in copy:
        copy.setdefault("additionalProperties", False)
    return copy
