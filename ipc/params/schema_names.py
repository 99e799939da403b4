"""keep_names(): a JSON schema whose rules for names hold for every spelling of a name, and never lead to a dead end.

llguidance allows escapes in the names of additional properties, so a declared name could appear again in another
spelling. Names from a pattern have no escapes. After an object's last possible name llguidance allows a comma if a
pattern matches only declared names.
"""

from collections.abc import Iterable
from typing import Any

from ipc.errors import InvalidRequestError
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


# texts_of(): the texts that a regular expression matches, if these are few.


_SIGNS = frozenset("^$.*+?()[]{}|\\")
_MAX_DEPTH = 20  # of groups


class _ManyError(Exception):
    """There are too many texts, or the expression has parts that are not supported here."""


def texts_of(pattern: str, most: int) -> list[str] | None:
    """Return the texts of a pattern that is anchored at both ends; None if they may be more than `most`.

    It may have characters, classes, groups, alternatives and question marks: `^(a|b[12])c?$`.
    """
    if not pattern.startswith("^") or not pattern.endswith("$") or pattern.endswith("\\$"):
        return None
    reader = _Reader(pattern[1:-1], most)
    try:
        if not reader.is_one_alternative():
            return None
        found = reader.alternatives(0)
    except (_ManyError, IndexError):
        return None
    return found if reader.is_at_end() else None


class _Reader:
    def __init__(self, text: str, most: int) -> None:
        self._text, self._most, self._at = text, most, 0

    def is_at_end(self) -> bool:
        return self._at == len(self._text)

    def is_one_alternative(self) -> bool:
        """Return whether the anchors apply to all alternatives: in `^a|b$` each applies to one."""
        depth, at, in_class = 0, 0, False
        while at < len(self._text):
            one = self._text[at]
            if in_class:
                in_class = one != "]"
            else:
                in_class = one == "["
                depth += (one == "(") - (one == ")")
                if one == "|" and depth == 0:
                    return False
            at += 2 if one == "\\" else 1
        return True

    def alternatives(self, depth: int) -> list[str]:
        if depth > _MAX_DEPTH:
            raise _ManyError
        found = self._sequence(depth)
        while self._next() == "|":
            self._at += 1
            found = self._few([*found, *self._sequence(depth)])
        return found

    def _sequence(self, depth: int) -> list[str]:
        found = [""]
        while self._next() not in ("", "|", ")"):
            item = self._item(depth)
            if self._next() == "?":
                self._at += 1
                item = self._few(["", *item])
            if len(found) * len(item) > self._most:
                raise _ManyError
            found = self._few(begin + end for begin in found for end in item)
        return found

    def _item(self, depth: int) -> list[str]:
        one = self._next()
        if one == "[":
            return self._class()
        if one != "(":
            return [self._character()]
        self._at += 3 if self._text.startswith("(?:", self._at) else 1
        found = self.alternatives(depth + 1)
        if self._next() != ")":
            raise _ManyError
        self._at += 1
        return found

    def _class(self) -> list[str]:
        self._at += 1
        found = list[str]()
        while self._next() != "]":
            first = last = self._character(in_class=True)
            if self._next() == "-" and self._text[self._at + 1] != "]":
                self._at += 1
                last = self._character(in_class=True)
            if ord(last) - ord(first) >= self._most:
                raise _ManyError
            found = self._few([*found, *map(chr, range(ord(first), ord(last) + 1))])
        self._at += 1
        return found

    def _character(self, *, in_class: bool = False) -> str:
        one = self._text[self._at]
        self._at += 1
        if one == "\\":
            one = self._text[self._at]
            self._at += 1
            if one.isalnum():  # \\d, \\n, \\x41, \\1
                raise _ManyError
            return one
        if (one in "^[" if in_class else one in _SIGNS) or not one.isprintable():
            raise _ManyError
        return one

    def _few(self, texts: Iterable[str]) -> list[str]:
        found = list(dict.fromkeys(texts))
        if len(found) > self._most:
            raise _ManyError
        return found

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]
