"""keep_names(): a JSON schema whose rules for names hold for every spelling of a name, and never lead to a dead end.

llguidance allows escapes in the names of additional properties, so a declared name could appear again in another
spelling. Names from a pattern have no escapes. After an object's last possible name llguidance allows a comma if a
pattern matches only declared names.
"""

from typing import Any

from ipc.errors import InvalidRequestError
from ipc.params.finite_pattern import texts_of
from ipc.params.json_schemas import rewrite

MAX_OPTIONAL = 480  # properties of an object that may be missing
_MAX_FINITE = 64  # names of a pattern, in addition to the declared ones, that become properties
_MAX_NAME_CHARS = 4096  # total length of an object's declared names up to which its other names get a pattern
#: Keywords that combine a schema with other schemas: their rules are joined name by name.
_JOINS = frozenset(("allOf", "anyOf", "oneOf", "$ref", "if", "then", "else", "dependentSchemas", "dependencies"))
_TREE = dict[str, Any]  # by character; "" = a name ends here


def keep_names(schema: Any) -> Any:
    """Return a copy of the schema with the same meaning. A value that is not a schema is returned unchanged.

    A pattern with few names becomes properties. The names that an open object does not declare become a pattern, unless
    schemas are combined or there are other patterns: escapes remain possible there.
    """
    copy = rewrite(schema, _spell_patterns)
    return copy if _has_joins(copy) else rewrite(copy, _name_others)


def check_number_of_names(schema: Any) -> None:
    """Refuse an object with more optional properties than one position of llguidance's parser has room for.

    Errors: InvalidRequestError.
    """
    rewrite(schema, _check_optional)


def _check_optional(schema: dict[str, Any]) -> None:
    names, required = schema.get("properties"), schema.get("required")
    if isinstance(names, dict):
        needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        if (count := len(names.keys() - needed)) > MAX_OPTIONAL:
            raise InvalidRequestError(
                f"json: an object with {count} optional properties is not supported: at most {MAX_OPTIONAL} are; make "
                "some of them required, or leave them out"
            )


def _has_joins(schema: Any) -> bool:
    found: list[bool] = []
    rewrite(schema, lambda one: found.append("allOf" in one or ("properties" in one and not _JOINS.isdisjoint(one))))
    return any(found)


def _spell_patterns(schema: dict[str, Any]) -> None:
    patterns, declared = schema.get("patternProperties"), schema.get("properties", {})
    if not isinstance(patterns, dict) or not isinstance(declared, dict):
        return
    texts = {pattern: texts_of(pattern, len(declared) + _MAX_FINITE) for pattern in patterns}
    if None in texts.values():  # a pattern without an end matches further names, whatever is declared
        return
    names = dict(declared)
    for pattern, value in patterns.items():
        for name in texts[pattern] or ():
            names[name] = {"allOf": [names[name], value]} if names.get(name, value) != value else value
    schema["properties"] = names
    del schema["patternProperties"]


def _name_others(schema: dict[str, Any]) -> None:
    declared, others = schema.get("properties"), schema.get("additionalProperties", True)
    if not isinstance(declared, dict) or not declared or others is False or schema.get("patternProperties"):
        return
    if sum(map(len, declared)) <= _MAX_NAME_CHARS:
        value = {} if others is True else others
        schema |= {"patternProperties": {_other_names(declared): value}, "additionalProperties": False}


def _other_names(names: dict[str, Any]) -> str:
    """Return a pattern for all names except these."""
    tree: _TREE = {}
    for name in names:
        node = tree
        for character in name:
            node = node.setdefault(character, {})
        node[""] = {}
    return f"^{_pattern(tree)}$"


def _pattern(tree: _TREE) -> str:
    """Return a pattern for the texts that are not in a tree. It recurses to the length of the longest name."""
    begins = {f"\\x{{{ord(one):x}}}": node for one, node in tree.items() if one}
    ways = [f"[^{''.join(begins)}](?s:.*)" if begins else "(?s:.+)"]
    ways += [f"{begin}{_pattern(node)}" for begin, node in begins.items()]
    return f"(?:{'|'.join(ways)}){'' if '' in tree else '?'}"
