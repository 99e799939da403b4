"""Command line flags of structured outputs."""

import argparse
from pathlib import Path
from typing import Any

from ipc.errors import ConfigError
from ipc.params.structured_outputs import StructuredOutputsParams

_FROM_FILE = "@"


def add_structured_outputs_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a command's parser."""
    group = parser.add_argument_group(
        "structured outputs", "Give a text, or @FILE. The engine needs the extra 'structured'."
    )
    kinds = group.add_mutually_exclusive_group()
    kinds.add_argument("--json-schema", metavar="TEXT", help="the answer is JSON that matches this JSON schema")
    kinds.add_argument("--json-object", action="store_true", help="the answer is a JSON object")
    kinds.add_argument("--regex", metavar="TEXT", help="the answer matches this regular expression")
    kinds.add_argument(
        "--choice", action="append", metavar="TEXT", help="the answer is this text; if repeated, one of these texts"
    )
    kinds.add_argument("--grammar", metavar="TEXT", help="the answer matches this grammar, in Lark or GBNF")
    kinds.add_argument("--structural-tag", metavar="TEXT", help="JSON with `format`, or `structures` and `triggers`")
    group.add_argument("--disable-any-whitespace", action="store_true", help="JSON without white space")
    group.add_argument(
        "--disable-additional-properties",
        action="store_true",
        help="JSON objects have only the properties that the schema names",
    )
    group.add_argument("--whitespace-pattern", metavar="TEXT", help="regular expression for white space in JSON")


def read_structured_outputs(parsed: argparse.Namespace) -> StructuredOutputsParams | None:
    """Return the constraint that the flags set, or None. Errors: InvalidRequestError; ConfigError."""
    fields: dict[str, Any] = {
        "json": _read(parsed.json_schema),
        "json_object": parsed.json_object or None,
        "regex": _read(parsed.regex),
        "choice": parsed.choice,
        "grammar": _read(parsed.grammar),
        "structural_tag": _read(parsed.structural_tag),
    }
    options: dict[str, Any] = {
        "disable_any_whitespace": parsed.disable_any_whitespace,
        "disable_additional_properties": parsed.disable_additional_properties,
        "whitespace_pattern": parsed.whitespace_pattern,
    }
    if all(value is None for value in fields.values()) and not any(options.values()):
        return None
    return StructuredOutputsParams(**fields, **options)


def _read(value: str | None) -> str | None:
    """Return the text of a flag, read from a file if the value is @FILE."""
    if value is None or not value.startswith(_FROM_FILE):
        return value
    try:
        return Path(value.removeprefix(_FROM_FILE)).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{value}: {error}") from None
