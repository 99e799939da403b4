"""vLLM's way from a command line to LLM(): FlexibleArgumentParser, EngineArgs.add_cli_args()."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from ipc.options.config import OPTIONS
from ipc.options.neutral_options import NEUTRAL, WITHOUT_EFFECT, is_switch, value_of
from ipc.options.option import DeclaredOption

_SHORT = {"tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp", "data_parallel_size": "-dp"}
#: Arguments of LLM() in addition to the engine's options -> type.
_OTHERS = {"revision": str, "seed": int, "tokenizer": str, "skip_tokenizer_init": bool}


class FlexibleArgumentParser(argparse.ArgumentParser):
    """argparse's parser, in which --max_model_len also means --max-model-len."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Return the namespace of the arguments, and the unknown ones."""
        words = [_with_dashes(word) for word in (sys.argv[1:] if args is None else args)]
        return super().parse_known_args(words, namespace)


def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add a flag for each argument of LLM(), including vLLM's, and return the parser. Arguments that are not given are
    None.
    """
    for name, declared in OPTIONS.items():
        help_text = declared.option.help.replace("%", "%%")
        parser.add_argument(*_flags(name), dest=name, help=help_text, **_kind(declared))
    for name, kind in _OTHERS.items():
        if name not in OPTIONS:
            parser.add_argument(_flag(name), dest=name, **_plain(kind))
    for name in sorted({*WITHOUT_EFFECT, *NEUTRAL} - {*OPTIONS, *_OTHERS}):
        parser.add_argument(*_flags(name), dest=name, **_plain(bool if is_switch(name) else value_of))
    return parser


def names_of_arguments() -> frozenset[str]:
    """Return the names of the arguments that add_cli_args() adds."""
    return frozenset([*OPTIONS, *_OTHERS, *WITHOUT_EFFECT, *NEUTRAL])


def _with_dashes(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def _flags(name: str) -> list[str]:
    return [_flag(name), *([_SHORT[name]] if name in _SHORT else [])]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _kind(declared: DeclaredOption) -> dict[str, Any]:
    if declared.choices:
        return {"choices": declared.choices}
    return _plain(declared.plain if declared.plain in (bool, int, float, str) else value_of)


def _plain(kind: Any) -> dict[str, Any]:
    return {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
