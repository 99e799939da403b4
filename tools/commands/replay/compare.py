"""`engine-core replay FILE --compare OTHER`: run one capture with two versions of the program and report the first
difference.

This version's decisions are in a capture: FILE itself if this version decides as the one that wrote it, otherwise a new
capture of FILE's requests. The other version replays that capture with its own `replay --json`.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from core.capture.file import CaptureFile
from ipc.errors import CaptureFileError, ConfigError
from ipc.log_lines import counted
from tools.commands.replay.rerun import recorded_executor, replay_config, rerun
from tools.commands.replay.shrink.workload import read_workload
from tools.commands.replay.shrink.written import write_capture

EXIT_SAME = 0
EXIT_DIFFERS = 3
_STATUSES = (EXIT_SAME, EXIT_DIFFERS)
_LIMIT_S = 3600.0


class Comparison(msgspec.Struct, frozen=True):
    """The object that --json prints."""

    capture: str
    other: str
    is_own: bool  # the decisions are FILE's; otherwise its requests ran here, and the other version replayed that run
    num_steps: int
    difference: dict[str, Any] | None  # as in `replay --json`: the other version's first difference from this one


def run_compare(file: CaptureFile, other: str, *, as_json: bool) -> int:
    """Compare this version with another, print the first difference, and return the exit status.

    other: a checkout, or the path of its `engine-core`. Errors: ConfigError, CaptureFileError, OtherModelError.
    """
    command, environment = _other(other)
    with _decided_here(file) as (path, is_own):
        report = _replay(command, environment, path)
    difference = report["run"]["difference"]
    comparison = Comparison(str(file.path), other, is_own, report["num_steps"], difference)
    if as_json:
        sys.stdout.write(msgspec.json.encode(comparison).decode() + "\n")
    else:
        _print(comparison)
    return EXIT_SAME if difference is None else EXIT_DIFFERS


@contextlib.contextmanager
def _decided_here(file: CaptureFile) -> Iterator[tuple[Path, bool]]:
    """Yield (a capture with this version's decisions, whether it is the file itself)."""
    if rerun(file, replay_config(file.header), recorded_executor(file)).difference is None:
        yield file.path, True
        return
    if file.begins_inside:
        raise CaptureFileError(
            f"{file.path}: this version decides differently from the one that wrote it, and the file begins with a "
            "checkpoint, so its requests cannot be run again: use a file from the engine's start"
        )
    with tempfile.TemporaryDirectory(prefix="engine-core-compare-") as folder:
        path = Path(folder) / "here.cap"
        write_capture(read_workload(file), str(path))
        yield path, False


def _other(other: str) -> tuple[list[str], dict[str, str]]:
    """Return the command of another version, and its environment. Errors: ConfigError."""
    path = Path(other)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if (path / "tools" / "cli.py").is_file():
        start = "import sys; from tools.cli import main; sys.exit(main(sys.argv[1:]))"
        return [sys.executable, "-P", "-c", start], {**environment, "PYTHONPATH": str(path.resolve())}
    if path.is_file() and os.access(path, os.X_OK):
        return [str(path.resolve())], environment
    raise ConfigError(f"--compare {other}: neither a checkout of engine-core nor the path of its command")


def _replay(command: list[str], environment: dict[str, str], path: Path) -> dict[str, Any]:
    """Return what the other version's `replay --json` prints. Errors: CaptureFileError if it cannot replay."""
    words = [*command, "replay", str(path), "--json"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode not in _STATUSES:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise CaptureFileError(
            f"the other version cannot replay {path}: {lines[-1] if lines else 'no reason given'} "
            f"(status {done.returncode})"
        )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _print(comparison: Comparison) -> None:
    where = "" if comparison.is_own else ", its requests run again here, because this version decides differently"
    print(f"{comparison.capture}: {counted(comparison.num_steps, 'step')}{where}")
    found = comparison.difference
    if found is None:
        print(f"  {comparison.other} makes the same decisions")
        return
    print(f"  {comparison.other} first decides differently in step {found['step']} ({found['kind']}):")
    print("  - this version only, + the other one only, ~ both")
    for line in found["details"]:
        print(f"    {line}")
