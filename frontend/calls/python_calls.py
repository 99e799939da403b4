"""Calls in Python's notation, `[name(key="value", ...), other()]`, as Gemma 3 and Llama 3.2 are told to write them.

A list of calls is shown when it is complete: only then is it known to be one.
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


def read_python_calls(source: Source, sink: Sink, tools: Tools, end: str) -> Reading[None]:
    """Read a list of calls, and the mark `end` behind it. Errors: NotACallError."""
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
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NotACallError from None
    return tree.elts if isinstance(tree, ast.List) else []


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
