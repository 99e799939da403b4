"""Warnings and errors of the HTTP process, where the log is JSON."""

import json
import logging
import sys

from frontend.http.process.json_log import JsonFormatter


def line_of(text: str, *arguments: object, level: int = logging.WARNING, failed: bool = False) -> dict[str, str]:
    info = sys.exc_info() if failed else None
    record = logging.LogRecord("engine_core.http", level, "f.py", 1, text, arguments, info)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    fields: dict[str, str] = json.loads(line)
    return fields


def test_a_warning_is_one_object() -> None:
    fields = line_of("the field %.*r is not known", 4, "na\nme and more")
    assert fields.pop("time").endswith("Z")
    assert fields == {"message": "the field 'na\\ is not known", "level": "warning", "logger": "engine_core.http"}


def test_a_failure_has_its_traceback() -> None:
    try:
        raise KeyError("lost")
    except KeyError:
        fields = line_of("request %s failed", "a1", level=logging.ERROR, failed=True)
    assert (fields["message"], fields["level"]) == ("request a1 failed", "error")
    assert fields["traceback"].endswith("KeyError: 'lost'")
