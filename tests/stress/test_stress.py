"""`make stress` counts what ran and what failed, once, and adds its runs to those of earlier calls."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.stress.__main__ import main, summary

pytestmark = pytest.mark.checkout

CONFTEST = 'pytest_plugins = ["tests.processes.plugin"]\n'
TESTS = """
import pathlib
import pytest

@pytest.mark.parametrize("n", range(6))
def test_passes(n):
    pass

def test_fails_once():
    file = pathlib.Path(__file__).with_name("ran")
    was_there = file.exists()
    file.touch()
    assert was_there, "said by the first"
"""


def line(**differing: Any) -> dict[str, Any]:
    usual = {"began": "2026-11-01T10:00:00Z", "commit": "aaaa", "cpu": "a CPU", "cores": 2, "arguments": ["tests"]}
    counts = {"burn": 4, "status": 0, "passed": 100, "failed": [], "slowest": ["t.py::t", 3.0]}
    return {**usual, **counts, "seconds": 1800, "load": 6.0, **differing}


def test_the_summary_counts_runs_of_the_same_and_each_failure() -> None:
    runs = [
        line(),
        line(commit="bbbb", status=1, passed=99, failed=["t.py::a"], load=9.5, slowest=["t.py::b", 44.5]),
        line(commit="cccc+", status=1, passed=98, failed=["t.py::b", "t.py::a"]),
        line(arguments=["--processes", "2", "tests/ipc"], burn=2, passed=7, seconds=360),
        line(status=3, passed=0, began="2026-11-02T10:00:00Z"),
    ]
    assert summary(runs).splitlines() == [
        "4 runs of tests",
        "    3 failed; 297 tests passed in 2.00 hours",
        "    burn 4, load 6.0 to 9.5, 2 cores of a CPU",
        "1 run of --processes 2 tests/ipc",
        "    0 failed; 7 tests passed in 0.10 hours",
        "    burn 2, load 6.0 to 6.0, 2 cores of a CPU",
        "failed 2: t.py::a (bbbb, cccc+)",
        "failed 1: t.py::b (cccc+)",
        "status 3, no test failed: 2026-11-02T10:00:00Z (aaaa)",
        "slowest: 44.5 s, t.py::b",
    ]
    assert summary([]) == "no runs yet"


def test_what_fails_once_stays_a_failure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tests, record = tmp_path / "tests", tmp_path / "record"
    tests.mkdir()
    (tests / "conftest.py").write_text(CONFTEST)
    (tests / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "tests.stress", "--burn", "1", "--folder", str(record)]
    places = [f"--rootdir={tests}", f"--basetemp={tmp_path / 'base'}", str(tests)]
    pytest_arguments = ["-p", "no:cacheprovider", "--processes", "2", *places]
    done = subprocess.run([*command, "--runs", "2", *pytest_arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    first, second = [json.loads(line) for line in (record / "runs.jsonl").read_text().splitlines()]
    assert (first["status"], first["passed"], first["failed"]) == (1, 6, ["test_it.py::test_fails_once"])
    assert (second["status"], second["passed"], second["failed"]) == (0, 7, [])
    (said,) = record.glob("*.txt")
    assert "said by the first" in said.read_text()
    assert main(["--runs", "0", "--folder", str(record)]) == 0, "earlier failures are no failures of this call"
    assert "failed 1: test_it.py::test_fails_once" in capfd.readouterr().out
