"""The console script `engine-core`. A subcommand's module is imported only when it is called."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from ipc.errors import EngineCoreError
from tools.options import ArgumentParser, print_error
from tools.version import version

#: Subcommand -> module with main(arguments) -> exit status, and its line in --help.
COMMANDS = {
    "generate": ("tools.generate", "stream the answers to some prompts in the terminal"),
    "serve": ("tools.serve", "run an engine that clients connect to"),
    "replay": ("tools.replay.__main__", "run a capture of an engine again and compare"),
    "bench": ("tools.bench.__main__", "measure latency, throughput and start-up"),
}
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status. Errors of ipc.errors become one message, never a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] in (["version"], ["--version"]):
        print(f"engine-core {version()}")
        return 0
    parser = _parser()
    if not words or words[0] in ("-h", "--help"):
        parser.print_help(sys.stdout if words else sys.stderr)
        return 0 if words else EXIT_USAGE
    command = parser.parse_args(words[:1]).command
    try:
        status = importlib.import_module(COMMANDS[command][0]).main(words[1:])
        sys.stdout.flush()
    except EngineCoreError as error:
        print_error(str(error))
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more at its end, which would fail again, loudly.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    return int(status)


def _parser() -> ArgumentParser:
    lines = [f"  {name:10} {text}" for name, (_, text) in {**COMMANDS, "version": ("", "print the version")}.items()]
    parser = ArgumentParser(
        prog="engine-core",
        usage="engine-core COMMAND [OPTION ...]",
        description="An LLM engine in a process of its own.",
        epilog="commands:\n" + "\n".join(lines) + "\n\n`engine-core COMMAND --help` tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=[*COMMANDS, "version"], metavar="COMMAND", help="one of those below")
    return parser


if __name__ == "__main__":
    sys.exit(main())
