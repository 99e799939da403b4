"""Command line flags of sampling parameters, and the parameters that they set."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ipc.errors import ConfigError
from ipc.params.sampling_params import NUMBERS, OF_DRAWS, SamplingParams
from ipc.params.structured_outputs import StructuredOutputsParams
from tools.flags.options import flag_of

_BEAMS = ("best_of", "length_penalty", "early_stopping")
_SAMPLING = (*(name for name in NUMBERS if name != "max_tokens"), "stop", *_BEAMS)
_DEFAULTS = "A value that is not given is the model's recommendation, otherwise greedy (--temperature 0)."
_WIDTH = 4  # beams
_EARLY_STOPPING: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Add a flag for each sampling parameter. max_tokens: the default of --max-tokens."""
    group = parser.add_argument_group("sampling options", _DEFAULTS)
    group.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help="default: %(default)s")
    for name, one in NUMBERS.items():
        if name != "max_tokens":  # which has a default
            metavar = "N" if one.kind is int else "X"
            group.add_argument(flag_of(name), type=one.kind, metavar=metavar, help=one.parameter.text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end at this text; may be repeated")
    group.add_argument(
        "--ignore-eos", action="store_true", help="do not end at the end-of-sequence token, only at --max-tokens"
    )
    group.add_argument("--use-beam-search", action="store_true", help="the most likely answer that a beam search finds")
    group.add_argument("--best-of", "--beam-width", type=int, metavar="N", help=f"number of beams; default: {_WIDTH}")
    group.add_argument(
        "--length-penalty", type=float, metavar="X", help="scores of the beams are total / length ** X; default: 1"
    )
    group.add_argument("--early-stopping", choices=_EARLY_STOPPING, help="when the search ends; default: false")
    add_structured_outputs_options(parser)


def add_lora_option(parser: argparse.ArgumentParser) -> None:
    """Add the flag that chooses an adapter."""
    parser.add_argument("--lora", metavar="NAME", help="the adapter that answers: of --lora-modules, or loaded since")


def sampling_params(
    parsed: argparse.Namespace, defaults: Mapping[str, float | int], demo: Mapping[str, float | int]
) -> SamplingParams:
    """Return the sampling parameters of a run. Errors: InvalidRequestError.

    For each field: the given value, otherwise the demo's, then the model's own default, then greedy. Of the last three,
    a beam search takes only fields that do not concern random draws.
    """
    given = {name: getattr(parsed, name) for name in _SAMPLING if getattr(parsed, name) is not None}
    known = {name: value for name, value in {**defaults, **demo}.items() if name in _SAMPLING}
    if parsed.early_stopping is not None:
        given["early_stopping"] = _EARLY_STOPPING[parsed.early_stopping]
    if parsed.use_beam_search:  # it draws nothing, so defaults for draws do not apply
        known = {name: value for name, value in known.items() if name not in OF_DRAWS} | {"best_of": _WIDTH}
    chosen: dict[str, Any] = {"temperature": 0.0, **known, **given, "use_beam_search": parsed.use_beam_search}
    chosen["structured_outputs"] = read_structured_outputs(parsed)
    return SamplingParams(max_tokens=parsed.max_tokens, ignore_eos=parsed.ignore_eos, **chosen)


def given_fields(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the parameters that the flags set as fields of a request over HTTP, whose server has the defaults.

    Errors: InvalidRequestError; ConfigError.
    """
    given = {name: getattr(parsed, name) for name in _SAMPLING if getattr(parsed, name) is not None}
    if parsed.early_stopping is not None:
        given["early_stopping"] = _EARLY_STOPPING[parsed.early_stopping]
    given |= {name: True for name in ("ignore_eos", "use_beam_search") if getattr(parsed, name)}
    constraint = read_structured_outputs(parsed)
    if constraint is not None:
        fields = msgspec.to_builtins(constraint)
        given["structured_outputs"] = {name: value for name, value in fields.items() if value not in (None, False)}
    return {"max_tokens": parsed.max_tokens, **given}


# Command line flags of structured outputs.


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
