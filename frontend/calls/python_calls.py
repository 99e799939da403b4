"""Calls in Python's notation, `[name(key="value", ...), other()]`, as Gemma 3 and Llama 3.2 are instructed to write
them.

A list of calls is sent when it is complete: only then is it certain that it is one.
"""

import ast
import json
import re

from frontend.calls.delta import Sink
from frontend.calls.json_calls import Tools
from frontend.calls.source import NotACallError, Reading, Source

MAX_LIST = 1 << 16  # characters
_PLAIN = re.compile(r"[^\"'\[\](){}]+")
_IN_STRING = {'"': re.compile(r'[^"\\]+'), "'": re.compile(r"[^'\\]+")}
#: A string with its prefix; or a number directly followed by a keyword, which is not a valid literal.
_STRING_OR_JOINED = re.compile(
    r"""(?<!\w)(?P<prefix>\w*)(?P<string>"[^"\\]*(?:\\.[^"\\]*)*"|'[^'\\]*(?:\\.[^'\\]*)*')"""
    r"|(?<![\w.])\.?\d[\w.]*(?:and|else|for|if|in|is|not|or)(?!\w)",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\([4-7][0-7]{2}|.)", re.DOTALL)
_ESCAPED = frozenset("\r\n\\'\"abfnrtvxNuU01234567")


def read_python_calls(source: Source, sink: Sink, tools: Tools, end: str) -> Reading[None]:
    """Read a list of calls, and the mark `end` after it. Errors: NotACallError."""
    yield from source.skip_space()
    text = yield from _read_brackets(source)
    calls = [_read_call(node, tools) for node in _parse(text)]
    if not calls:
        raise NotACallError
    if end:
        yield from source.skip_space()
        yield from source.take(end)
    source.release()
    for name, arguments in calls:
        sink.begin_call(name)
        sink.arguments(arguments)


def _read_brackets(source: Source) -> Reading[str]:
    """Return the text from a bracket to the one that closes it."""
    if (yield from source.peek()) != "[":
        raise NotACallError
    parts: list[str] = []
    depth = 0
    while True:
        char = yield from source.peek()
        if not char:
            raise NotACallError
        source.at += 1
        parts.append(char)
        if char in _IN_STRING:
            yield from _read_string(source, char, parts)
        depth += (char in "[({") - (char in "])}")
        if not depth:
            return "".join(parts)
        parts.append(source.run(_PLAIN))


def _read_string(source: Source, quote: str, parts: list[str]) -> Reading[None]:
    while True:
        parts.append(source.run(_IN_STRING[quote]))
        char = yield from source.peek()
        if not char:
            raise NotACallError
        source.at += 1
        parts.append(char)
        if char == quote:
            return
        if char == "\\" and (yield from source.peek()):
            parts.append(source.text[source.at])
            source.at += 1


def _parse(text: str) -> list[ast.expr]:
    try:
        tree = ast.parse(_STRING_OR_JOINED.sub(_without_warnings, text), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NotACallError from None
    return tree.elts if isinstance(tree, ast.List) else []


def _without_warnings(found: re.Match[str]) -> str:
    """Return a string in a form that the parser accepts without warnings, which would contain the model's text.

    The parser warns about unknown escapes, which it keeps as they are, and about octal ones above \\377. Errors:
    NotACallError for a literal that JSON does not have.
    """
    if found["string"] is None:
        raise NotACallError
    prefix = found["prefix"].lower()
    if prefix == "r":
        return found[0]
    if prefix not in ("", "u"):
        raise NotACallError
    return _ESCAPE.sub(_known_escape, found["string"])


def _known_escape(found: re.Match[str]) -> str:
    """Return a valid escape with the same value."""
    if len(found[1]) == 3:
        return f"\\u{int(found[1], 8):04x}"
    return found[0] if found[1] in _ESCAPED else f"\\{found[0]}"


def _read_call(node: ast.expr, tools: Tools) -> tuple[str, str]:
    """Return a call's name and arguments."""
    if not isinstance(node, ast.Call) or node.args:
        raise NotACallError
    try:
        name = ast.unparse(node.func)
        if tools is not None and name not in tools:
            raise NotACallError
        arguments = {str(one.arg): ast.literal_eval(one.value) for one in node.keywords if one.arg}
        return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise NotACallError from None
