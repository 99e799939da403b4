"""The formats of a structural tag, as XGrammar names them: a tree of chunks of text.

Each kind is a class here, with the fields and defaults of XGrammar 0.2. Unsupported parts are refused by name:
token-level kinds, styles other than JSON's, and budgets of tokens.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from ipc.errors import InvalidRequestError, UnsupportedParameterError

#: Formats of one tree. Each is a rule or part of one.
MAX_FORMATS = 1024
#: Formats, tags or strings in one list.
MAX_ELEMENTS = 256
#: Most characters of a string to search for in free text.
MAX_MARK_CHARS = 1024
#: Most repetitions, or characters of free text, that a format may count.
MAX_COUNT = 1 << 16

_Mark = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_MARK_CHARS)]
_Marks = Annotated[list[_Mark], msgspec.Meta(max_length=MAX_ELEMENTS)]
_Ends = Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_ELEMENTS)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
_Elements = Annotated[list["Format"], msgspec.Meta(min_length=1, max_length=MAX_ELEMENTS)]
_Tags = Annotated[list["Tag"], msgspec.Meta(min_length=1, max_length=MAX_ELEMENTS)]


class _Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of the formats: `type` names the kind, and an unknown field is an error."""


class ConstString(_Node, frozen=True, tag="const_string"):
    """This text."""

    value: str


class JsonSchema(_Node, frozen=True, tag="json_schema"):
    """JSON that the schema accepts."""

    json_schema: dict[str, Any] | bool
    style: Literal["json"] = "json"
    any_order: Literal[False] = False
    max_whitespace_cnt: None = None


class AnyText(_Node, frozen=True, tag="any_text"):
    """Any text that contains none of `excludes`, and no end of the innermost tag around it."""

    excludes: _Marks = []
    max_tokens: None = None
    max_chars: _Count | None = None  # characters of Unicode


class Grammar(_Node, frozen=True, tag="grammar"):
    """A text of a grammar in GBNF notation, whose first rule is `root`."""

    grammar: Annotated[str, msgspec.Meta(min_length=1)]


class Regex(_Node, frozen=True, tag="regex"):
    """A match of the whole expression; its dot is any character."""

    pattern: Annotated[str, msgspec.Meta(min_length=1)]


class Sequence(_Node, frozen=True, tag="sequence"):
    """The elements, one after the other."""

    elements: _Elements


class Or(_Node, frozen=True, tag="or"):
    """One of the elements."""

    elements: _Elements


class Optional(_Node, frozen=True, tag="optional"):
    """The content or nothing."""

    content: "Format"


class Plus(_Node, frozen=True, tag="plus"):
    """The content, once or several times."""

    content: "Format"


class Star(_Node, frozen=True, tag="star"):
    """The content, any number of times."""

    content: "Format"


class Repeat(_Node, frozen=True, tag="repeat"):
    """The content, `min` to `max` times; -1 = without an upper bound."""

    content: "Format"
    min: _Count
    max: Annotated[int, msgspec.Meta(ge=-1, le=MAX_COUNT)]


class Tag(_Node, frozen=True, tag="tag"):
    """`begin`, the content, and one of `end`."""

    begin: str
    content: "Format"
    end: str | _Ends

    @property
    def ends(self) -> tuple[str, ...]:
        """The texts of at least one character that may end the tag."""
        return tuple(end for end in ([self.end] if isinstance(self.end, str) else self.end) if end)


class TriggeredTags(_Node, frozen=True, tag="triggered_tags"):
    """Any text, in which each trigger must start one of the tags that begin with it."""

    triggers: Annotated[list[_Mark], msgspec.Meta(min_length=1, max_length=MAX_ELEMENTS)]
    tags: _Tags
    at_least_one: bool = False  # a tag comes first
    stop_after_first: bool = False  # nothing follows a tag
    excludes: _Marks = []  # must not occur in text between tags


class TagsWithSeparator(_Node, frozen=True, tag="tags_with_separator"):
    """Any number of tags, with the separator between them."""

    tags: _Tags
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


class Dispatch(_Node, frozen=True, tag="dispatch"):
    """Any text, in which a rule's pattern is followed by its format."""

    rules: Annotated[list[tuple[_Mark, "Format"]], msgspec.Meta(min_length=1, max_length=MAX_ELEMENTS)]
    loop: bool = True  # text may follow again
    excludes: _Marks = []


Format: TypeAlias = (
    ConstString
    | JsonSchema
    | AnyText
    | Grammar
    | Regex
    | Sequence
    | Or
    | Optional
    | Plus
    | Star
    | Repeat
    | Tag
    | TriggeredTags
    | TagsWithSeparator
    | Dispatch
)


class _Top(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Format
    type: Literal["structural_tag"] = "structural_tag"


#: Kinds and fields of XGrammar that are refused.
_REFUSED_KINDS = (
    *("token", "exclude_token", "any_tokens", "token_triggered_tags", "token_dispatch"),
    "qwen_xml_parameter",
)
_REFUSED_VALUES = {"style": "json", "any_order": False, "max_whitespace_cnt": None, "max_tokens": None}


def read_format(value: dict[str, Any]) -> Format:
    """Return the format of a structural tag. Errors: InvalidRequestError that names the position in the tree."""
    _check_known(value.get("format"), "format")
    try:
        top = msgspec.convert(value, _Top)
    except msgspec.ValidationError as error:
        why, _, place = str(error).partition(" - at `$")
        where = place.rstrip("`").lstrip(".")
        raise InvalidRequestError(f"structural_tag: {where + ': ' if where else ''}{why}") from None
    for index, (node, place, ends) in enumerate(_nodes(top.format, "format", ())):
        if index == MAX_FORMATS:
            raise InvalidRequestError(f"structural_tag has more than {MAX_FORMATS} formats")
        _check(node, place, ends)
    return top.format


def _nodes(node: Format, place: str, ends: tuple[str, ...]) -> Iterator[tuple[Format, str, tuple[str, ...]]]:
    """Yield a format and all formats in it, each with its position and the ends of the innermost tag around it."""
    yield node, place, ends
    match node:
        case Sequence() | Or():
            parts = [(one, f"elements[{index}]") for index, one in enumerate(node.elements)]
        case Optional() | Plus() | Star() | Repeat() | Tag():
            parts = [(node.content, "content")]
            ends = node.ends if isinstance(node, Tag) else ends
        case TriggeredTags() | TagsWithSeparator():
            parts = [(one, f"tags[{index}]") for index, one in enumerate(node.tags)]
        case Dispatch():
            parts = [(one, f"rules[{index}][1]") for index, (_, one) in enumerate(node.rules)]
        case _:
            return
    for part, name in parts:
        yield from _nodes(part, f"{place}.{name}", ends)


def _check(node: Format, place: str, ends: tuple[str, ...]) -> None:
    """Refuse contradictory fields of a format."""
    match node:
        case TriggeredTags():
            for index, tag in enumerate(node.tags):
                count = sum(map(tag.begin.startswith, node.triggers))
                if count != 1:
                    text = f"{count} triggers begin {tag.begin!r:.80}; exactly one must"
                    raise InvalidRequestError(f"structural_tag: {place}.tags[{index}].begin: {text}")
            if not (node.at_least_one and node.stop_after_first):  # otherwise there is no free text
                _check_triggers(f"{place}.triggers", node.triggers, (*node.excludes, *ends))
        case Dispatch():
            _check_triggers(f"{place}.rules", [pattern for pattern, _ in node.rules], node.excludes)
        case Repeat() if -1 < node.max < node.min:
            raise InvalidRequestError(f"structural_tag: {place}: min {node.min} is above max {node.max}")


def _check_triggers(place: str, triggers: list[str], excludes: Iterable[str]) -> None:
    """Refuse a trigger that no text can reach because another mark is a part of it."""
    for index, trigger in enumerate(triggers):
        for other in (*triggers[:index], *triggers[index + 1 :], *excludes):
            if other in trigger:
                text = (
                    f"{trigger!r:.80} contains {other!r:.80}, which is another trigger, an excluded text, or an "
                    "end of the tag around it"
                )
                raise InvalidRequestError(f"structural_tag: {place}[{index}]: {text}")


def _check_known(value: object, place: str) -> None:
    """Refuse by name what XGrammar has and this engine does not. A schema's content is not examined."""
    if isinstance(value, list):
        for index, one in enumerate(value):
            _check_known(one, f"{place}[{index}]")
    if not isinstance(value, dict):
        return
    if (kind := value.get("type")) in _REFUSED_KINDS:
        raise UnsupportedParameterError(f"structural_tag: {place}: the format {kind} is not supported by this version")
    for name, default in _REFUSED_VALUES.items():
        if value.get(name, default) != default:
            raise UnsupportedParameterError(f"structural_tag: {place}.{name} is not supported by this version")
    for name, one in value.items():
        if name != "json_schema":
            _check_known(one, f"{place}.{name}")
