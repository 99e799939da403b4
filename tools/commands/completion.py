"""`engine-core completion`: shell completion for bash, zsh and fish, from the declared options of all commands.

The script that it prints is argcomplete's. At each TAB it runs `engine-core` again with certain environment variables,
and complete() answers: argcomplete reads the line and quotes its suggestions for the shell.
"""

import argparse
import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from argcomplete.completers import SuppressCompleter
from argcomplete.finders import CompletionFinder
from argcomplete.shell_integration import shellcode

from ipc.errors import ModelFileError
from ipc.files.hub_cache import cached_models
from tools.command_table import COMMANDS, HOME
from tools.flags.options import ArgumentParser

_SHELLS = ("bash", "zsh", "fish")
_MODEL_NAMES = ("MODEL", "MODEL ...")
_FILE_NAMES = ("FILE", "PATH", "FOLDER", "TRACE")
_MAX_FILES = 1000  # a folder may hold millions
#: argcomplete's variable: how many words of the line name the program whose parser it gets.
_PROGRAM_WORDS = "_ARGCOMPLETE"


def main(arguments: Sequence[str]) -> int:
    """Print the completion script for one shell, and return the exit status."""
    parser = ArgumentParser(
        prog="engine-core completion",
        usage="engine-core completion {bash,zsh,fish}",
        description="Print a shell script that completes commands, options, values and models.",
        epilog='bash: eval "$(engine-core completion bash)" in ~/.bashrc. zsh: the same with zsh, after compinit, in '
        "~/.zshrc. fish: engine-core completion fish > ~/.config/fish/completions/engine-core.fish",
    )
    parser.add_argument("shell", choices=_SHELLS)
    parsed = parser.parse_args(arguments)
    print(shellcode(["engine-core"], shell=parsed.shell))
    return 0


def complete(words: Sequence[str]) -> None:
    """Write the possible completions of the line's last word, and end the process.

    words: the words before the one to complete; the first is the program.
    """
    command = words[1] if len(words) > 1 else None
    if command == "help":
        parser = _command_names()
    elif command in COMMANDS:
        parser = declared_parser(command)
    elif command is None:
        parser, os.environ[_PROGRAM_WORDS] = _command_names("help", "version"), "1"
    else:
        os._exit(0)
    if command is not None:
        os.environ[_PROGRAM_WORDS] = "2"
    for action in parser._actions:
        if completer := _completer(action):
            action.completer = completer  # type: ignore[attr-defined]
    CompletionFinder()(parser, default_completer=SuppressCompleter())


def words_before(line: str, point: int) -> list[str]:
    """Return the complete words before the cursor, without the word at the cursor."""
    before = line.encode()[:point].decode(errors="ignore")
    words = before.split()
    return words if before[-1:].isspace() else words[:-1]


def _command_names(*more: str) -> ArgumentParser:
    parser = ArgumentParser(prog="engine-core", add_help=False)
    parser.add_argument("command", choices=[*COMMANDS, *more])
    return parser


class _Declared(Exception):
    """Carries a command's parser out of its main() before main() parses with it."""

    def __init__(self, parser: ArgumentParser) -> None:
        self.parser = parser


def declared_parser(command: str) -> ArgumentParser:
    """Return the parser of a command, as its module declares it."""

    def stop(parser: ArgumentParser) -> None:
        raise _Declared(parser)

    before, ArgumentParser.before_parsing = ArgumentParser.before_parsing, stop
    try:
        importlib.import_module(f"{HOME}{COMMANDS[command][0]}").main(())
    except _Declared as declared:
        return declared.parser
    finally:
        ArgumentParser.before_parsing = before
    raise AssertionError(f"engine-core {command} parses no arguments")


def _completer(action: argparse.Action) -> Callable[..., Iterator[str]] | None:
    metavar = str(action.metavar or "")
    if metavar in _MODEL_NAMES or action.dest == "model":
        return _models_and_files
    return _files if metavar in _FILE_NAMES else None


def _models_and_files(prefix: str, **context: Any) -> Iterator[str]:
    with contextlib.suppress(ModelFileError):  # without huggingface_hub there is no cache
        yield from (str(model.name) for model in cached_models())
    yield from _files(prefix)


def _files(prefix: str, **context: Any) -> Iterator[str]:
    """Yield the files with this prefix; folders end with a slash. No shell evaluates the names."""
    folder, _, start = prefix.rpartition("/")
    above = f"{folder}/" if "/" in prefix else ""
    try:
        with os.scandir(os.path.expanduser(above) or ".") as entries:
            for _, entry in zip(range(_MAX_FILES), entries, strict=False):
                if entry.name.startswith(start) and (start or not entry.name.startswith(".")):
                    yield f"{above}{entry.name}" + ("/" if entry.is_dir() else "")
    except OSError:
        return
