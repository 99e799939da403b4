"""What a structural tag accepts, by trying all its readings: slow, and without any grammar."""

import re
from collections.abc import Iterable

import jsonschema
import msgspec

from ipc.params.structural_tags import (
    AnyText,
    ConstString,
    Dispatch,
    Format,
    JsonSchema,
    Optional,
    Or,
    Plus,
    Regex,
    Repeat,
    Sequence,
    Star,
    Tag,
    TagsWithSeparator,
    TriggeredTags,
)

Rules = list[tuple[str, Format]]


def accepts(node: Format, text: str) -> bool:
    """Whether the whole text is one of the format's."""
    return len(text) in Acceptor(text).ends(node, 0, ())


class Acceptor:
    """Where in one text the formats that begin at a place may end."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._known: dict[tuple[int, int, tuple[str, ...]], set[int]] = {}
        self._rules: dict[int, Rules] = {}  # of TriggeredTags; kept, so that no two formats have one id()

    def ends(self, node: Format, at: int, marks: tuple[str, ...]) -> set[int]:
        """marks: the ends of the innermost tag around. Each question is answered once: repetitions within repetitions
        would ask the innermost one exponentially often."""
        key = id(node), at, marks
        if key not in self._known:
            self._known[key] = self._ends(node, at, marks)
        return self._known[key]

    def _ends(self, node: Format, at: int, marks: tuple[str, ...]) -> set[int]:
        match node:
            case ConstString():
                return self.literal(node.value, at)
            case Regex():
                return {end for end in self.places(at) if re.fullmatch(node.pattern, self.text[at:end], re.DOTALL)}
            case JsonSchema():
                return {end for end in self.places(at) if is_json(node.json_schema, self.text[at:end])}
            case AnyText():
                limit = len(self.text) if node.max_chars is None else node.max_chars
                return {end for end in self.free(at, (*node.excludes, *marks)) if end - at <= limit}
            case Sequence():
                return self.row([(one, marks) for one in node.elements], {at})
            case Or():
                return set().union(*(self.ends(one, at, marks) for one in node.elements))
            case Optional():
                return {at} | self.ends(node.content, at, marks)
            case Plus() | Star():
                return self.repeated(node.content, at, marks, int(isinstance(node, Plus)), -1)
            case Repeat():
                return self.repeated(node.content, at, marks, node.min, node.max)
            case Tag():
                return self.tag(node, at)
            case TagsWithSeparator():
                return self.separated(node, at)
            case Dispatch():
                return self.dispatched(list(node.rules), (*node.excludes,), at, marks, is_loop=node.loop)
            case TriggeredTags():
                return self.triggered(node, at, marks)
        raise AssertionError(node)

    def places(self, at: int) -> range:
        return range(at, len(self.text) + 1)

    def literal(self, text: str, at: int) -> set[int]:
        return {at + len(text)} if self.text.startswith(text, at) else set()

    def free(self, at: int, marks: Iterable[str]) -> set[int]:
        return {end for end in self.places(at) if not any(mark in self.text[at:end] for mark in marks)}

    def row(self, nodes: list[tuple[Format, tuple[str, ...]]], starts: set[int]) -> set[int]:
        for node, marks in nodes:
            starts = set().union(*(self.ends(node, at, marks) for at in starts))
        return starts

    def repeated(self, node: Format, at: int, marks: tuple[str, ...], low: int, high: int) -> set[int]:
        starts, found = {at}, {at} if low == 0 else set[int]()
        for count in range(1, len(self.text) + low + 2 if high == -1 else high + 1):
            starts = self.row([(node, marks)], starts)
            if not starts:
                break
            found |= starts if count >= low else set()
        return found

    def tag(self, tag: Tag, at: int) -> set[int]:
        inner = self.row([(tag.content, tag.ends)], self.literal(tag.begin, at))
        last = [tag.end] if isinstance(tag.end, str) else tag.end
        return {end for middle in inner for text in last for end in self.literal(text, middle)}

    def separated(self, node: TagsWithSeparator, at: int) -> set[int]:
        found = reached = set().union(*(self.tag(tag, at) for tag in node.tags))
        while reached and not node.stop_after_first:
            starts = {start for end in reached for start in self.literal(node.separator, end)}
            reached = set().union(*(self.tag(tag, start) for tag in node.tags for start in starts)) - found
            found = found | reached
        return found if node.at_least_one else found | {at}

    def triggered(self, node: TriggeredTags, at: int, marks: tuple[str, ...]) -> set[int]:
        first = set().union(*(self.tag(tag, at) for tag in node.tags))
        if node.at_least_one and node.stop_after_first:
            return first
        unused = [one for one in node.triggers if not any(tag.begin.startswith(one) for tag in node.tags)]
        rules = self.rules(node)
        excludes, found = (*node.excludes, *marks, *unused), set[int]()
        for start in first if node.at_least_one else {at}:
            found |= self.dispatched(rules, excludes, start, (), is_loop=not node.stop_after_first)
        return found

    def rules(self, node: TriggeredTags) -> Rules:
        """(trigger, the tag without it) of each tag."""
        if id(node) not in self._rules:
            triggers = [next(one for one in node.triggers if tag.begin.startswith(one)) for tag in node.tags]
            self._rules[id(node)] = [
                (trigger, msgspec.structs.replace(tag, begin=tag.begin[len(trigger) :]))
                for trigger, tag in zip(triggers, node.tags, strict=True)
            ]
        return self._rules[id(node)]

    def dispatched(
        self, rules: Rules, excludes: tuple[str, ...], at: int, marks: tuple[str, ...], *, is_loop: bool
    ) -> set[int]:
        triggers = list(dict.fromkeys(trigger for trigger, _ in rules))
        found, waiting, seen = set[int](), [at], set[int]()
        while waiting:
            start = waiting.pop()
            if start in seen:
                continue
            seen.add(start)
            free = self.free(start, (*triggers, *excludes))
            found |= free
            end = max(free) + 1  # where the first mark ends
            for trigger, node in rules:
                if end <= len(self.text) and self.text[start:end].endswith(trigger):
                    reached = self.ends(node, end, marks)
                    found |= set() if is_loop else reached
                    waiting += reached if is_loop else ()
        return found


def is_json(schema: object, text: str) -> bool:
    """Whether a text is JSON of the schema, with no white space around it."""
    try:
        value = msgspec.json.decode(text)
        jsonschema.validate(value, schema)
    except (msgspec.DecodeError, jsonschema.ValidationError):
        return False
    return text == text.strip()
