"""Command line flags of sampling parameters, and the parameters that they give."""

import argparse
from collections.abc import Mapping
from typing import Any

from ipc.params.sampling_params import SamplingParams
from tools.flags.structured_outputs import add_structured_outputs_options, read_structured_outputs

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_OF_DRAWS = ("temperature", "top_p", "top_k", "min_p")
_BEAMS = ("best_of", "length_penalty", "early_stopping")
_SAMPLING = (*_OF_DRAWS, "n", "seed", "stop", *_PENALTIES, *_BEAMS)
_WIDTH = 4  # beams
_EARLY_STOPPING: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Add a flag for each sampling parameter. max_tokens: the default of --max-tokens."""
    group = parser.add_argument_group("sampling options")
    group.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help="default: %(default)s")
    group.add_argument("--n", type=int, metavar="N", help="answers to each prompt, which is computed once; default: 1")
    group.add_argument("--temperature", type=float, metavar="X", help="default: the model's, else 0 = greedy")
    group.add_argument("--top-p", type=float, metavar="X")
    group.add_argument("--top-k", type=int, metavar="N")
    group.add_argument("--min-p", type=float, metavar="X")
    for name in _PENALTIES:
        group.add_argument("--" + name.replace("_", "-"), type=float, metavar="X")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answers")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end at this text; may be given again")
    group.add_argument("--ignore-eos", action="store_true", help="go on until --max-tokens")
    group.add_argument("--use-beam-search", action="store_true", help="the likeliest answer that a beam search finds")
    group.add_argument("--best-of", "--beam-width", type=int, metavar="N", help=f"its beams; default: {_WIDTH}")
    group.add_argument("--length-penalty", type=float, metavar="X", help="its scores: total / length ** X; default: 1")
    group.add_argument("--early-stopping", choices=_EARLY_STOPPING, help="when it ends; default: false")
    add_structured_outputs_options(parser)


def sampling_params(
    parsed: argparse.Namespace, defaults: Mapping[str, float | int], demo: Mapping[str, float | int]
) -> SamplingParams:
    """Return the sampling parameters of a run. Errors: InvalidRequestError.

    For each field: the value given, else the demo's, else the model's own default, else greedy. Of the last three a
    beam search takes those that concern no draw.
    """
    given = {name: getattr(parsed, name) for name in _SAMPLING if getattr(parsed, name) is not None}
    known = {name: value for name, value in {**defaults, **demo}.items() if name in _SAMPLING}
    if parsed.early_stopping is not None:
        given["early_stopping"] = _EARLY_STOPPING[parsed.early_stopping]
    if parsed.use_beam_search:  # it draws nothing, so that defaults for draws are not for it
        known = {name: value for name, value in known.items() if name not in _OF_DRAWS} | {"best_of": _WIDTH}
    chosen: dict[str, Any] = {"temperature": 0.0, **known, **given, "use_beam_search": parsed.use_beam_search}
    chosen["structured_outputs"] = read_structured_outputs(parsed)
    return SamplingParams(max_tokens=parsed.max_tokens, ignore_eos=parsed.ignore_eos, **chosen)
