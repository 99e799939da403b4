"""Calls of FunctionGemma and Gemma 4: `call:NAME{key:value,...}`, with special marks instead of quotes.

Strings are between two of these marks and may contain anything. Keys are bare. The arguments are converted to JSON as
they arrive.
"""

import json
import re

from frontend.calls.delta import Sink
from frontend.calls.json_calls import Tools
from frontend.calls.source import NotACallError, Reading, Source

_NAME = re.compile(r"[\w.-]+")
_KEY = re.compile(r"[^:,{}\[\]<]+")
_BARE = re.compile(r"[^,{}\[\]<]+")
_MAX_DEPTH = 32
_LITERALS = ("true", "false", "null")


def read_gemma_calls(source: Source, sink: Sink, tools: Tools, end: str) -> Reading[None]:
    """Read one call of FunctionGemma. Errors: NotACallError."""
    yield from _read(source, sink, end, "<escape>")


def read_gemma4_calls(source: Source, sink: Sink, tools: Tools, end: str) -> Reading[None]:
    """Read one call of Gemma 4. Errors: NotACallError."""
    yield from _read(source, sink, end, '<|"|>')


def _read(source: Source, sink: Sink, end: str, quote: str) -> Reading[None]:
    yield from source.skip_space()
    if not (yield from source.take("call:")):
        raise NotACallError
    name = yield from source.collect(_NAME)
    if not name or (yield from source.peek()) != "{":
        raise NotACallError
    source.release()
    sink.begin_call(name)
    yield from _Converter(source, sink, quote).value(0)
    yield from source.skip_space()
    yield from source.take(end)


class _Converter:
    """Reads values and converts them to JSON. It stops if the text is cut, or if nothing can follow."""

    def __init__(self, source: Source, sink: Sink, quote: str) -> None:
        self._source, self._show, self._quote = source, sink.arguments, quote

    def value(self, depth: int) -> Reading[bool]:
        """Read a value; return whether it is complete."""
        source = self._source
        yield from source.skip_space()
        if (yield from source.take(self._quote)):
            return (yield from self._string())
        char = yield from source.peek()
        if char in ("{", "[") and depth < _MAX_DEPTH:
            return (yield from self._members(char, depth))
        text = (yield from source.collect(_BARE)).strip()
        self._show(text if text in _LITERALS or _is_number(text) else json.dumps(text, ensure_ascii=False))
        return bool(text)

    def _members(self, bracket: str, depth: int) -> Reading[bool]:
        source, close = self._source, "}" if bracket == "{" else "]"
        source.at += 1
        self._show(bracket)
        is_first = True
        while True:
            yield from source.skip_space()
            if (yield from source.take(close)):
                self._show(close)
                return True
            if not is_first and not (yield from source.take(",")):
                return False
            yield from source.skip_space()
            if not (yield from source.peek()):
                return False
            self._show("" if is_first else ", ")
            is_first = False
            if bracket == "{" and not (yield from self._key()):
                return False
            if not (yield from self.value(depth + 1)):
                return False

    def _key(self) -> Reading[bool]:
        if (yield from self._source.take(self._quote)):
            yield from self._string()
        else:
            self._show(json.dumps((yield from self._source.collect(_KEY)).strip(), ensure_ascii=False))
        if not (yield from self._source.take(":")):
            return False
        self._show(": ")
        return True

    def _string(self) -> Reading[bool]:
        self._show('"')
        found = yield from self._source.until([self._quote], lambda text: self._show(_escaped(text)))
        self._show('"' if found else "")
        return bool(found)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _is_number(text: str) -> bool:
    try:
        return isinstance(json.loads(text), int | float) and text[-1].isdigit()
    except (ValueError, IndexError):
        return False
