"""Calls that are JSON objects with a name and arguments: alone, in a row, or in a list.

The arguments are sent as they arrive, as the model wrote them. They are not checked: text that is not JSON is still the
call's arguments, as in OpenAI's API. Only two things are corrected: line ends in strings, which JSON requires to be
escaped, and arguments that are a string of JSON text.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from frontend.calls.delta import Sink
from frontend.calls.source import MAX_KEPT, NotACallError, Reading, Source

#: Tools of a request: name -> the JSON schema of the arguments. None = any name is a call.
Tools = Mapping[str, Mapping[str, Any]] | None

_BETWEEN = re.compile(r"[\s,;]+")
_BETWEEN_MARKED = re.compile(r"[\s,;}\]]+")  # models sometimes write an extra bracket
_IN_STRING = re.compile(r'[^"\\]+')
_PLAIN = re.compile(r'[^"{}\[\]<]+')
_SCALAR = re.compile(r"[^\s,}\]<]+")
_CONTROLS = {code: json.dumps(chr(code))[1:-1] for code in range(32)}
_NAME = re.compile(r"[\w.-]+")
_ARGUMENTS = ("arguments", "parameters")


class _Fields:
    """The state of one call."""

    def __init__(self, sink: Sink, source: Source, tools: Tools) -> None:
        self._sink, self._source, self._tools = sink, source, tools
        self.name = ""
        self.early: list[str] | None = None  # arguments that arrived before the name
        self.is_begun = False
        self.is_nested = False  # the fields are those of the field "function", as in OpenAI's API

    def begin(self) -> None:
        """Begin the call. Errors: NotACallError for a name that is not a tool's."""
        if not self.name or (self._tools is not None and self.name not in self._tools):
            raise NotACallError
        self._source.release()
        self._sink.begin_call(self.name)
        self.is_begun = True
        if self.early is not None:
            self._sink.arguments("".join(self.early))

    def show_arguments(self, text: str) -> None:
        """Take a part of the arguments."""
        if not self.is_begun and self.name:
            self.begin()
        if self.is_begun:
            self._sink.arguments(text)
        else:
            self.early = [*(self.early or ()), text]


def read_json_calls(source: Source, sink: Sink, tools: Tools, end: str) -> Reading[None]:
    """Read calls up to the mark `end`, or up to other text. Errors: NotACallError before the first call has begun."""
    yield from source.skip_space()
    is_list = yield from source.take("[")
    yield from source.skip_space()
    yield from _read_call(source, sink, tools, end)
    while True:
        yield from source.collect(_BETWEEN_MARKED if end else _BETWEEN)
        if (yield from source.peek()) != "{":
            break
        source.keep(source.at, MAX_KEPT)
        try:
            yield from _read_call(source, sink, tools, end)
        except NotACallError:
            sink.content(source.give_back())
            return
    if is_list and not end:
        yield from source.take("]")
    if end:
        yield from source.take(end)


def read_named_calls(source: Source, sink: Sink, tools: Tools, end: str) -> Reading[None]:
    """Read one call in Mistral's form NAME[CALL_ID]ID[ARGS]{...}, or its older list. Errors: NotACallError."""
    yield from source.skip_space()
    if (yield from source.peek()) in ("[", "{"):
        yield from read_json_calls(source, sink, tools, end)
        return
    fields = _Fields(sink, source, tools)
    fields.name = yield from source.collect(_NAME)
    if (yield from source.take("[CALL_ID]")):
        yield from source.collect(_NAME)
    yield from source.take("[ARGS]")
    yield from source.skip_space()
    if (yield from source.peek()) != "{":
        raise NotACallError
    fields.begin()
    yield from _read_value(source, sink.arguments, end)


def _read_call(source: Source, sink: Sink, tools: Tools, end: str) -> Reading[None]:
    fields = _Fields(sink, source, tools)
    try:
        is_whole = yield from _read_fields(source, fields, end)
        if not fields.is_begun and is_whole:
            fields.early = fields.early or ["{}"]
            fields.begin()
    except NotACallError:
        if fields.is_begun:
            return  # text follows a call
        raise
    if not fields.is_begun:
        raise NotACallError


def _read_fields(source: Source, fields: _Fields, end: str) -> Reading[bool]:
    """Read one object; return whether it is complete."""
    if not (yield from source.take("{")):
        raise NotACallError
    while True:
        yield from source.collect(_BETWEEN)
        if (yield from source.take("}")):
            return True
        if not (yield from source.peek()):
            return False
        key = yield from _read_text(source)
        yield from source.skip_space()
        if not (yield from source.take(":")):
            raise NotACallError
        yield from source.skip_space()
        first = yield from source.peek()
        if key == "function" and first == "{" and not fields.is_nested:
            fields.is_nested = True
            yield from _read_fields(source, fields, end)
        elif key in ("name", "function") and first == '"' and not fields.name:
            fields.name = yield from _read_text(source)
        elif key in _ARGUMENTS and not fields.is_begun and fields.early is None:
            yield from _read_arguments(source, fields, first, end)
        else:
            yield from _read_value(source, _drop, end)


def _read_arguments(source: Source, fields: _Fields, first: str, end: str) -> Reading[None]:
    if first == "{" or first == "[":
        yield from _read_value(source, fields.show_arguments, end)
        return
    parts: list[str] = []
    yield from _read_value(source, parts.append, end)
    text = "".join(parts)
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    text = value if isinstance(value, str) else "" if value is None else text
    fields.show_arguments(text if text.strip() else "{}")


def _drop(text: str) -> None:
    """Send nothing."""


def _read_value(source: Source, show: Callable[[str], None], end: str) -> Reading[None]:
    """Read one JSON value. It also ends at the mark `end` outside of strings, in case the model forgets to close it."""
    depth = 0
    while True:
        if depth and (plain := source.run(_PLAIN)):
            show(plain)
        char = yield from source.peek()
        if not char or (end and char == end[0] and (yield from _comes(source, end))):
            return
        if char == '"':
            yield from _read_string(source, show)
        elif depth or char in "{[":
            show(char)
            source.at += 1
            depth += (char in "{[") - (char in "}]")
        else:
            show((yield from source.collect(_SCALAR)))
        if not depth:
            return


def _comes(source: Source, mark: str) -> Reading[bool]:
    """Return whether `mark` is next, without reading it."""
    if (yield from source.take(mark)):
        source.at -= len(mark)
        return True
    return False


def _read_string(source: Source, show: Callable[[str], None]) -> Reading[bool]:
    """Read a string with its quotes; return whether it is complete."""
    show('"')
    source.at += 1
    while char := (yield from source.peek()):
        if char not in '"\\':
            show(source.run(_IN_STRING).translate(_CONTROLS))
            continue
        source.at += 1
        show(char)
        if char == '"':
            return True
        if escaped := (yield from source.peek()):
            show(escaped)
            source.at += 1
    return False


def _read_text(source: Source) -> Reading[str]:
    """Return the text of a string. Errors: NotACallError for another value, or an incomplete one."""
    if (yield from source.peek()) != '"':
        raise NotACallError
    parts: list[str] = []
    if not (yield from _read_string(source, parts.append)):
        raise NotACallError
    try:
        return str(json.loads("".join(parts)))
    except ValueError:
        raise NotACallError from None
