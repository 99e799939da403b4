"""StructuredOutputsParams: the constraint on one request's output text. Names and defaults are vLLM's.

The engine compiles it to a grammar (core/grammars/) and forbids, at each position, the tokens that the grammar refuses.
"""

import contextlib
import json as json_text
import re
from typing import Annotated, Any

import msgspec

from ipc.errors import InvalidRequestError
from ipc.params.structural_tags import Format, read_format

#: Bytes of UTF-8. Larger grammars take seconds to compile.
MAX_SCHEMA_BYTES = 1 << 18
MAX_GRAMMAR_BYTES = 1 << 16
MAX_REGEX_BYTES = 1 << 14
MAX_WHITESPACE_PATTERN_BYTES = 256
MAX_CHOICES = 4096
#: Nested objects and arrays of a JSON schema or a structural tag.
MAX_SCHEMA_DEPTH = 64
MAX_STRUCTURAL_TAGS = 256

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
#: The kinds whose grammar contains a JSON schema, to which the options apply.
_JSON_KINDS = ("json", "json_object", "structural_tag")
#: A JSON string, or a bracket. It takes linear time for any text: a string that has begun always matches.
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+"?|[{}\[\]]', re.DOTALL)


#: Bounds that a decoder checks before it makes a value. A schema is text on the wire; a dict is for Python callers.
_NoWireDict = Annotated[dict[str, Any], msgspec.Meta(max_length=0)]
_Choices = Annotated[list[str], msgspec.Meta(max_length=MAX_CHOICES)]


class StructuredOutputsParams(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True, weakref=True):
    """The required form of the output: exactly one of json, regex, choice, grammar, json_object and structural_tag.

    New fields are appended and none is removed, for the wire format. Errors: InvalidRequestError that names the field
    and what is allowed. Whether a grammar can be compiled is known only when the request arrives at the engine.
    """

    json: str | _NoWireDict | None = None  # a JSON schema; stored as text
    regex: str | None = None  # matches the whole output
    choice: _Choices | None = None  # the output is one of these
    grammar: str | None = None  # in Lark's or GBNF's notation; it begins with the rule start (GBNF: root)
    json_object: bool | None = None  # any JSON object
    disable_any_whitespace: bool = False  # JSON without white space between its parts
    disable_additional_properties: bool = False  # as if each object schema with properties forbade others
    whitespace_pattern: str | None = None  # regex for white space in JSON; default: up to 20 characters
    #: JSON text: {"format": {"type": ..., ...}}, or the older {"structures": [{begin, schema, end}, ...],
    #: "triggers": [...]}
    structural_tag: str | _NoWireDict | None = None

    def __post_init__(self) -> None:
        if self.json_object is False:
            self.json_object = None
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs needs exactly one of {', '.join(_KINDS)}; got {', '.join(given) or 'none'}"
            )
        if self.json is not None:
            self.json = _schema_text(self.json)
        if isinstance(self.structural_tag, dict):
            self.structural_tag = _json_text("structural_tag", self.structural_tag)
        _check_text("regex", self.regex, MAX_REGEX_BYTES)
        _check_text("grammar", self.grammar, MAX_GRAMMAR_BYTES)
        _check_text("whitespace_pattern", self.whitespace_pattern, MAX_WHITESPACE_PATTERN_BYTES)
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool | None):
                raise InvalidRequestError(f"{name} must be True or False, got {getattr(self, name)!r:.80}")
        self.choice = _choices(self.choice)
        if self.structural_tag is not None:
            _check_structural_tag(self.structural_tag)
        self._check_options(given[0])

    @property
    def kind(self) -> str:
        """Return the field that is given."""
        return next(name for name in _KINDS if getattr(self, name) is not None)

    def _check_options(self, kind: str) -> None:
        options = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
        used = [name for name in options if getattr(self, name)]
        if used and kind not in _JSON_KINDS:
            raise InvalidRequestError(f"{used[0]} applies to JSON and has no effect on {kind}: leave it out")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise InvalidRequestError("disable_any_whitespace and whitespace_pattern contradict each other: give one")


def _check_text(name: str, text: object, max_bytes: int) -> None:
    if text is None:
        return
    if not isinstance(text, str) or not text:
        raise InvalidRequestError(f"{name} must be a str of at least one character, got {text!r:.80}")
    with contextlib.suppress(UnicodeEncodeError):
        if len(text.encode()) > max_bytes:
            raise InvalidRequestError(f"{name} has {len(text.encode())} bytes; at most {max_bytes} are allowed")
        return
    raise InvalidRequestError(f"{name} must be valid Unicode; {text!r:.80} has a lone surrogate")


def _schema_text(schema: object) -> str:
    """Return the text of a JSON schema, which is a JSON object."""
    if isinstance(schema, dict):
        schema = _json_text("json", schema)
    if not isinstance(schema, str):
        raise InvalidRequestError(f"json must be a JSON schema, a dict or its text, got {schema!r:.80}")
    _check_text("json", schema, MAX_SCHEMA_BYTES)
    _parse_object("json", schema)
    return schema


def _json_text(name: str, value: dict[str, Any]) -> str:
    try:
        return json_text.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} is not JSON: {error}") from None


def _parse_object(name: str, text: str) -> dict[str, Any]:
    """Return the JSON object of this text."""
    if _depth(text) > MAX_SCHEMA_DEPTH:
        raise InvalidRequestError(f"{name} nests objects and arrays more than {MAX_SCHEMA_DEPTH} deep")
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"{name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{name} must be a JSON object, got {text!r:.80}")
    return value


def _depth(text: str) -> int:
    """Return how deep the brackets of a JSON text nest, without those in strings."""
    deepest = depth = 0
    for bracket in _BRACKETS.findall(text):
        if bracket in "{[":
            depth += 1
            deepest = max(deepest, depth)
        elif bracket in "}]":
            depth -= 1
    return deepest


def _choices(choices: object) -> list[str] | None:
    if choices is None:
        return None
    if not isinstance(choices, (list, tuple)) or not 0 < len(choices) <= MAX_CHOICES:
        raise InvalidRequestError(f"choice must be a list of 1 to {MAX_CHOICES} strings, got {choices!r:.80}")
    for text in choices:
        _check_text("an element of choice", text, MAX_GRAMMAR_BYTES)
    _check_text("choice", "".join(choices), MAX_GRAMMAR_BYTES)
    return list(choices)


def _check_structural_tag(text: object) -> None:
    _check_text("structural_tag", text, MAX_SCHEMA_BYTES)
    assert isinstance(text, str), type(text)
    read_structural_tag(text)


class StructuralTag(msgspec.Struct, frozen=True):
    """One tag: `trigger` is followed by the rest of `begin`, then JSON by the schema, then `end`."""

    trigger: str  # a prefix of `begin`
    begin: str
    schema: dict[str, Any]
    end: str


def read_structural_tag(text: str) -> list[StructuralTag] | Format:
    """Return the tags of a structural_tag's JSON text, or the format of one of the newer form.

    Errors: InvalidRequestError, and UnsupportedParameterError for what XGrammar has and this engine does not.
    """
    value = _parse_object("structural_tag", text)
    if "format" in value:
        return read_format(value)
    structures, triggers = value.get("structures"), value.get("triggers")
    if not isinstance(structures, list) or not 0 < len(structures) <= MAX_STRUCTURAL_TAGS:
        raise InvalidRequestError(f"structural_tag needs `structures`, a list of 1 to {MAX_STRUCTURAL_TAGS} objects")
    if not isinstance(triggers, list) or not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise InvalidRequestError("structural_tag needs `triggers`, a list of strings of at least one character")
    tags = []
    for entry in structures:
        fields = entry if isinstance(entry, dict) else {}
        begin, schema, end = (fields.get(name) for name in ("begin", "schema", "end"))
        if not isinstance(begin, str) or not isinstance(schema, dict) or not isinstance(end, str):
            raise InvalidRequestError(f"a structure has begin (str), schema (object) and end (str), got {entry!r:.80}")
        trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        if trigger is None:
            raise InvalidRequestError(f"no trigger is a prefix of the structure's begin {begin!r:.80}")
        tags.append(StructuralTag(trigger, begin, schema, end))
    return tags
