"""`engine-core replay shrink FILE OUT --fails-when EXPR`, and `replay FILE --fails-when EXPR` for git bisect."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from core.capture.file import CaptureFile
from core.capture.output import check_capture
from ipc.errors import CaptureFileError, ConfigError, EngineCoreError
from tools.commands.replay.fails_when import NAMES, TIMES, FailsWhen
from tools.commands.replay.shrink.passes import Shrinker
from tools.commands.replay.shrink.trial import CONSTANT, Trial
from tools.commands.replay.shrink.workload import read_workload
from tools.commands.replay.shrink.written import describe, pytest_text, write_capture
from tools.commands.replay.what_if.recording import read_recording
from tools.commands.replay.what_if.step_time import StepTime, fit
from tools.flags.options import ArgumentParser, print_error

EXIT_GOOD = 0
EXIT_BAD = 1
EXIT_SKIP = 125  # git bisect: this version cannot judge it
EXIT_ABORT = 128  # git bisect: stop


def run_shrink(arguments: Sequence[str]) -> int:
    """Shrink a capture and write the result; return the exit status. Errors: CaptureFileError, ConfigError."""
    parser = ArgumentParser(
        prog="engine-core replay shrink",
        usage="engine-core replay shrink FILE OUT --fails-when EXPR [--seconds S] [--pytest FILE]",
        description="Write the smallest capture that still fails: fewer and shorter requests, a smaller engine.",
        epilog="EXPR compares these values: " + "; ".join(f"{name}: {text}" for name, text in NAMES.items()),
    )
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("out", metavar="OUT", help="the new capture; it contains the remaining requests")
    parser.add_argument(
        "--fails-when", required=True, metavar="EXPR", help="the condition that must stay true, such as 'crashed'"
    )
    parser.add_argument(
        "--seconds", type=float, default=300.0, metavar="S", help="longest search; default: %(default)g"
    )
    parser.add_argument("--pytest", metavar="FILE", help="also write a test, which passes once the condition is false")
    parsed = parser.parse_args(arguments)
    condition = FailsWhen(parsed.fails_when)
    check_capture(parsed.out)
    if parsed.pytest is not None and os.path.lexists(parsed.pytest):
        raise ConfigError(f"--pytest {parsed.pytest} exists already and is never overwritten: name another")
    file = CaptureFile(parsed.file)
    workload, trial = read_workload(file), Trial(condition, _time_of(file, condition))
    if not trial.fails(workload):
        raise ConfigError(
            f"{parsed.file}: {parsed.fails_when!r} is not true in a simulation of it: there is nothing to shrink"
        )
    begin = time.monotonic()
    shrinker = Shrinker(workload, trial.fails, parsed.seconds)
    left = shrinker.run()
    write_capture(left, parsed.out)
    if parsed.pytest is not None:
        if condition.names & TIMES:
            sys.stderr.write("engine-core: the test's steps take a millisecond each, not as long as captured\n")
        Path(parsed.pytest).write_text(pytest_text(left, parsed.fails_when, Path(parsed.file).name))
    late = ", out of time" if shrinker.is_out_of_time else ""
    print(f"{parsed.file}: {describe(workload.requests)}")
    print(f"{parsed.out}: {describe(left.requests)}; {trial.num_runs} runs in {time.monotonic() - begin:.1f} s{late}")
    return 0


def judge(path: str, text: str) -> int:
    """Return the exit status for git bisect: whether the condition is true in a simulation of the capture.

    An invalid condition, or a path without a file, ends the bisection, because it would fail for every version.
    """
    try:
        condition = FailsWhen(text)
    except ConfigError as error:
        return _abort(str(error))
    if not os.path.exists(path):
        return _abort(f"there is no file {path}")
    try:
        file = CaptureFile(path)
        trial = Trial(condition, _time_of(file, condition))
        values = trial.values(read_workload(file))
    except EngineCoreError as error:
        print(f"{path}: this version cannot judge it: {error}")
        return EXIT_SKIP
    shown = ", ".join(f"{name} = {values.get(name)!r}" for name in NAMES if name in condition.names)
    is_bad = condition.holds(values)
    print(f"{path}: {'fails' if is_bad else 'does not fail'}: {shown}")
    return EXIT_BAD if is_bad else EXIT_GOOD


def _abort(text: str) -> int:
    print_error(text)
    return EXIT_ABORT


def _time_of(file: CaptureFile, condition: FailsWhen) -> StepTime:
    """Return the fitted time of a step, if the condition needs it. Errors: CaptureFileError."""
    if not condition.names & TIMES:
        return CONSTANT
    try:
        recording = read_recording(file)
    except CaptureFileError as error:
        raise CaptureFileError(
            f"{error}; times are fitted to the steps of the version that wrote the capture, so conditions with "
            f"{', '.join(sorted(condition.names & TIMES))} need a capture that this version decides in the same way"
        ) from None
    return fit(recording.features, recording.durations)
