"""Calls of Qwen3-Coder and Qwen 3.5: `<function=NAME><parameter=KEY>value</parameter>...</function>`.

A value is text without quotes. It is a string if the tool's schema says so or if it is not JSON; otherwise it is JSON.
Each argument is sent when it is complete.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from frontend.calls.delta import Sink
from frontend.calls.json_calls import Tools
from frontend.calls.source import NotACallError, Reading, Source

_NAME = re.compile(r"[^<>\s]+")
_END = "</parameter>"


def read_xml_calls(source: Source, sink: Sink, tools: Tools, end: str) -> Reading[None]:
    """Read one call and the mark `end` after it. Errors: NotACallError."""
    yield from source.skip_space()
    if not (yield from source.take("<function=")):
        raise NotACallError
    name = yield from source.collect(_NAME)
    if not name or not (yield from source.take(">")):
        raise NotACallError
    source.release()
    sink.begin_call(name)
    sink.arguments("{")
    types = _types((tools or {}).get(name))
    num_read = 0
    while True:
        yield from source.skip_space()
        if not (yield from source.take("<parameter=")):
            break
        key = yield from source.collect(_NAME)
        yield from source.take(">")
        parts: list[str] = []
        ended = yield from source.until([_END], parts.append)
        if not ended:
            return  # cut
        value = "".join(parts).removeprefix("\n").removesuffix("\n")
        begin = ", " if num_read else ""
        sink.arguments(f"{begin}{json.dumps(key)}: {_as_json(value, types.get(key))}")
        num_read += 1
    sink.arguments("}")
    yield from source.take("</function>")
    yield from source.skip_space()
    yield from source.take(end)


def _types(schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the type of each argument that the schema names."""
    properties = (schema or {}).get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {key: one.get("type") for key, one in properties.items() if isinstance(one, Mapping)}


def _as_json(value: str, kind: Any) -> str:
    if kind != "string":
        try:
            return json.dumps(json.loads(value), ensure_ascii=False, allow_nan=False)  # NaN is Python's, not JSON
        except (ValueError, RecursionError):
            pass
        if value.lower() in ("true", "false"):
            return value.lower()
    return json.dumps(value, ensure_ascii=False)
