"""`replay shrink` and `--fails-when`: planted bugs are found in few requests, and the right version passes."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ipc.errors import ConfigError
from ipc.options.config import EngineConfig
from tests.captures import CONFIG, capture_in_process, make_request
from tests.core.capture.test_checkpoints import capture
from tests.tools.commands.planted_bugs import ANY, BUGS, Bug, Patch
from tools.cli import main
from tools.commands.replay.fails_when import FailsWhen
from tools.commands.replay.shrink.command import minimize, smallest

MOST_REQUESTS = 8
NUM_SOAK_STEPS = int(os.environ.get("SOAK_SHRINK_STEPS", "2700"))  # some 2,000 requests
#: In the suite.
QUICK = {"a_block_is_leaked", "growth_is_rounded_down", "a_shared_block_is_not_counted"}


def config_of(bug: Bug) -> EngineConfig:
    return msgspec.structs.replace(CONFIG, **bug.options)


def run_test(text: str) -> bool:
    """Run a written test here, with what is patched here; return whether it passes."""
    names: dict[str, Callable[[], None]] = {}
    exec(compile(text, "written", "exec"), names)
    try:
        names["test_it_does_not_fail_any_more"]()
    except AssertionError:
        return False
    return True


def check_shrinks(bug: Bug, source: Path, folder: Path, patch: Patch, seconds: int) -> int:
    """Shrink a right version's capture under the bug; return the number of requests that are left."""
    out, test = folder / "out.cap", folder / "test_out.py"
    with patch.context() as inner:
        bug.plant(inner)
        words = ["--fails-when", bug.condition, "--seconds", str(seconds), "--pytest", str(test)]
        assert main(["replay", "shrink", str(source), str(out), *words]) == 0
        assert main(["replay", str(out), "--fails-when", bug.condition]) == 1
        assert not run_test(test.read_text())
    assert main(["replay", str(out), "--fails-when", bug.condition]) == 0
    assert run_test(test.read_text())
    return test.read_text().count("'client':")


@pytest.mark.parametrize(
    "bug", [one for one in BUGS if one.plant.__name__ in QUICK], ids=lambda bug: bug.plant.__name__
)
def test_a_planted_bug_shrinks(bug: Bug, tmp_path: Path, monkeypatch: Patch) -> None:
    source = tmp_path / 'a""" + code + """\\.cap'  # a stranger's, whose name is in the written test
    capture_in_process(source, config_of(bug))
    assert check_shrinks(bug, source, tmp_path, monkeypatch, 60) <= MOST_REQUESTS


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.plant.__name__)
def test_every_planted_bug_shrinks_from_many_requests(bug: Bug, tmp_path: Path, monkeypatch: Patch) -> None:
    source = tmp_path / "a.cap"
    capture(source, config_of(bug), 3, NUM_SOAK_STEPS, make_request)
    assert check_shrinks(bug, source, tmp_path, monkeypatch, 300) <= MOST_REQUESTS


@pytest.mark.soak
def test_the_written_test_runs_by_itself(tmp_path: Path) -> None:
    """In a process of its own, by pytest; it fails, because the condition is no bug and still holds."""
    source, test = tmp_path / "a.cap", tmp_path / "test_out.py"
    capture_in_process(source)
    words = ["--fails-when", "steps > 1", "--pytest", str(test)]
    assert main(["replay", "shrink", str(source), str(tmp_path / "out.cap"), *words]) == 0
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
    assert done.returncode == 1, done.stdout + done.stderr
    assert "assert not condition.holds(values)" in done.stdout


def test_what_does_not_fail_is_not_shrunk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "a.cap"
    capture_in_process(source)
    assert main(["replay", "shrink", str(source), str(tmp_path / "out.cap"), "--fails-when", ANY]) == 1
    assert "nothing to shrink" in capsys.readouterr().err
    assert main(["replay", "shrink", str(source), str(source), "--fails-when", ANY]) == 1
    assert "never overwritten" in capsys.readouterr().err


def test_statuses_are_those_of_git_bisect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "a.cap"
    capture_in_process(source)
    for condition, status in (("most_preemptions > 0", 1), ("ttft_p99 > 1e9", 0), ("ttft_p99 > 0", 1)):
        assert main(["replay", str(source), "--fails-when", condition]) == status
    (tmp_path / "torn").write_bytes(b"nonsense")
    assert main(["replay", str(tmp_path / "torn"), "--fails-when", "crashed"]) == 125
    assert "cannot judge" in capsys.readouterr().out
    for words, reason in (
        ((source, "crash"), "it names 'crash'"),
        ((tmp_path / "none", "crashed"), "there is no file"),
    ):
        assert main(["replay", str(words[0]), "--fails-when", words[1]]) == 128
        assert reason in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["replay", str(source), "--fails-when", "crashed", "--what-if", "max_num_seqs=2"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1 +", "not an expression"),
        ("__import__('os')", "Call is not allowed"),
        ("ttft > 3", "it names 'ttft'"),
        ("1 < 2", "names no value"),
        ("error.x", "Attribute is not allowed"),
    ],
)
def test_conditions_that_are_none(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        FailsWhen(text)


def test_conditions() -> None:
    values = {"crashed": True, "error": "ValueError: 3 blocks", "ttft_mean": None, "steps": 7}
    for text in ("crashed", "'blocks' in error and steps == 7", "not crashed or 5 < steps < 9", "-steps < 0"):
        assert FailsWhen(text).holds(values)
    for text in ("ttft_mean > 3", "steps != 7"):
        assert not FailsWhen(text).holds(values)


def test_minimize_leaves_what_is_needed() -> None:
    rng = random.Random(5)
    for _ in range(100):
        items = list(range(rng.randrange(1, 60)))
        needed = set(rng.sample(items, rng.randrange(1, min(5, len(items)) + 1)))
        assert minimize(items, lambda part, needed=needed: needed <= set(part)) == sorted(needed)  # type: ignore[misc]
        most, least = rng.randrange(1, 100), rng.randrange(1, 100)
        least = min(most, least)
        assert smallest(most, 1, lambda number, least=least: number >= least) == least  # type: ignore[misc]
