"""`engine-core completion`: what bash, zsh and fish complete, made from the declarations of all commands' options."""

import argparse
import importlib
from collections.abc import Sequence

from tools.command_table import COMMANDS, HOME
from tools.flags.options import ArgumentParser
from tools.terminal import shells

_SHELLS = {"bash": shells.bash, "zsh": shells.zsh, "fish": shells.fish}
_MODEL_NAMES = ("MODEL", "MODEL ...")
_FILE_NAMES = ("FILE", "PATH", "FOLDER", "TRACE")


def main(arguments: Sequence[str]) -> int:
    """Print the completion for one shell, and return the exit status."""
    parser = ArgumentParser(
        prog="engine-core completion",
        usage="engine-core completion {bash,zsh,fish}",
        description="Print the completion of commands, options, values and models for a shell.",
        epilog='bash: eval "$(engine-core completion bash)" in ~/.bashrc. zsh: the same with zsh, behind compinit, in '
        "~/.zshrc. fish: engine-core completion fish > ~/.config/fish/completions/engine-core.fish",
    )
    parser.add_argument("shell", choices=tuple(_SHELLS))
    parsed = parser.parse_args(arguments)
    print(_SHELLS[parsed.shell](declared_commands()), end="")
    return 0


def declared_commands() -> list[shells.Command]:
    """Return all commands with their options, as their own parsers declare them."""
    commands = [_declared(name, module, text) for name, (module, text) in COMMANDS.items()]
    names = tuple(COMMANDS)
    return [
        *commands,
        shells.Command("help", "show the options of a command", (), shells.Values(names)),
        shells.Command("version", "print the version", (), shells.Values()),
    ]


class _Declared(Exception):
    """Carries a command's parser out of its main(), which would parse with it next."""

    def __init__(self, parser: ArgumentParser) -> None:
        self.parser = parser


def _declared(name: str, module: str, text: str) -> shells.Command:
    def stop(parser: ArgumentParser) -> None:
        raise _Declared(parser)

    before, ArgumentParser.before_parsing = ArgumentParser.before_parsing, stop
    try:
        importlib.import_module(f"{HOME}{module}").main(())
    except _Declared as declared:
        parser = declared.parser
    finally:
        ArgumentParser.before_parsing = before
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    flags = [
        shells.Flag(tuple(action.option_strings), _help(action), None if action.nargs == 0 else _values(action))
        for action in shown
        if action.option_strings
    ]
    positional = next((_values(action) for action in shown if not action.option_strings), shells.Values())
    return shells.Command(name, text, tuple(flags), positional)


def _values(action: argparse.Action) -> shells.Values:
    metavar = str(action.metavar or "")
    is_model = metavar in _MODEL_NAMES or action.dest == "model"
    return shells.Values(
        tuple(map(str, action.choices or ())), has_models=is_model, has_files=is_model or metavar in _FILE_NAMES
    )


def _help(action: argparse.Action) -> str:
    text = (action.help or "") % {"default": action.default} if "%" in (action.help or "") else action.help or ""
    return " ".join(text.split())
