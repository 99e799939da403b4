"""Command line flags of sampling parameters, and the parameters that they set."""

import argparse
from collections.abc import Mapping
from typing import Any

from ipc.params.sampling_params import NUMBERS, OF_DRAWS, SamplingParams
from tools.flags.options import flag_of
from tools.flags.structured_outputs import add_structured_outputs_options, read_structured_outputs

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
