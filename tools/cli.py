"""The console script `engine-core`. A subcommand's module is imported only when it is called."""

import argparse
import errno
import gc
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from ipc.errors import EngineCoreError
from ipc.version import NAME, VERSION
from tools.command_table import COMMANDS, GROUPS, HOME
from tools.flags.hints import COMMANDS as OTHER_COMMANDS
from tools.flags.options import ArgumentParser, print_error

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status. arguments: None = sys.argv's.

    Errors of ipc.errors are printed as one message on standard error, never as a traceback.
    """
    if "_ARGCOMPLETE" in os.environ:
        return _complete()
    _make_streams_usable()
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = _run(words, is_process=arguments is None)
        sys.stdout.flush()
    except EngineCoreError as error:
        print_error(str(error))
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS:
            raise
        _discard_output()
        print_error(f"cannot write the output: {error.strerror}")
        return EXIT_ERROR
    return status


def _complete() -> int:
    """Answer a shell that completes a line (tools/commands/completion.py)."""
    completion = importlib.import_module(f"{HOME}tools.commands.completion")
    line, point = os.environ.get("COMP_LINE", ""), os.environ.get("COMP_POINT", "0")
    completion.complete(completion.words_before(line, int(point)))
    return 0


def _run(words: list[str], *, is_process: bool) -> int:
    """Run one subcommand. is_process: the process ends with it."""
    if words[:1] in (["version"], ["--version"]):
        print(f"{NAME} {VERSION}")
        return 0
    parser = _parser()
    if not words or words[0] in ("-h", "--help"):
        parser.print_help(sys.stdout if words else sys.stderr)
        return 0 if words else EXIT_USAGE
    if words[0] == "help":
        words = [*words[1:2], "--help"]
        return _run(words, is_process=is_process)
    if words[0] in OTHER_COMMANDS:
        parser.error(f"unknown command {words[0]}: {OTHER_COMMANDS[words[0]]}")
    command = parser.parse_args(words[:1]).command
    return int(_load(f"{HOME}{COMMANDS[command][0]}", is_process=is_process).main(words[1:]))


def _load(name: str, *, is_process: bool) -> Any:
    """Import a module without the garbage collector, which would look through what stays: an eighth of the time.

    In a process of its own it never looks there, not at the end either, which would take a third of a short command.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if is_process:
            gc.freeze()
        if is_process or collects:
            gc.enable()


def _make_streams_usable() -> None:
    """Make standard output and standard error usable in all cases.

    Output to a stream that the caller closed is dropped. A character that stdout cannot encode is escaped.
    """
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - stays open until the process ends
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Drop what stdout still buffers: otherwise the interpreter's flush at exit would fail again, with a traceback."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="engine-core",
        usage="engine-core COMMAND [OPTION ...]",
        description="An LLM inference engine that runs in its own process.",
        epilog=f"{_commands_in_groups()}\n`engine-core COMMAND --help` shows its options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=[*COMMANDS, "version"], metavar="COMMAND", help="one of the commands below")
    return parser


def _commands_in_groups() -> str:
    others = set(COMMANDS).difference(*GROUPS.values())
    lines = []
    for heading, names in {**GROUPS, "other": [name for name in COMMANDS if name in others]}.items():
        lines += [f"{heading}:", *(f"  {name:14} {COMMANDS[name][1]}" for name in names), ""]
    lines[-1:] = [f"  {'help':14} the same as --help", f"  {'version':14} print the version", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
