"""`engine-core check-executor`: check an executor, usually a plug-in's, under the real scheduler in this process.

It runs the same random requests one by one, together, in chunks, preempted, swapped, from the prefix cache and with two
steps in flight. Each output is checked against its plan. At numerics level L2 all answers must be bit-identical.
"""

from collections.abc import Sequence

from ipc.options.given_options import config_from_options
from tools.flags.options import ArgumentParser, add_engine_options, engine_options
from tools.lab.check_executor.checks import check_executor

_NUM_REQUESTS = 36
_WORDS = {True: "ok", False: "FAILED", None: "seen"}


def main(arguments: Sequence[str]) -> int:
    """Print a line for each check, and return the exit status: 1 if one failed. Errors: ConfigError; the executor's."""
    parser = ArgumentParser(
        prog="engine-core check-executor",
        usage="engine-core check-executor NAME [--requests N] [OPTION ...]",
        description="Check that an executor follows the contract of docs/executors.md; for a plug-in's CI.",
    )
    parser.add_argument("name", metavar="NAME", help="the executor's name: a plug-in's, or local or fake")
    parser.add_argument("--requests", type=int, default=_NUM_REQUESTS, metavar="N", help="default: %(default)s")
    add_engine_options(parser)
    parsed = parser.parse_args(arguments)
    if not 1 <= parsed.requests <= 4096:
        parser.error("--requests must be from 1 to 4096")
    config = config_from_options(**{**engine_options(parsed), "executor": parsed.name})
    num_failed = 0
    for finding in check_executor(config, parsed.requests):
        print(f"{_WORDS[finding.is_right]:>6}  {finding.name}: {finding.text}", flush=True)
        num_failed += finding.is_right is False
    print(f"executor {parsed.name}: " + (f"{num_failed} of its checks failed" if num_failed else "every check passed"))
    return 1 if num_failed else 0
