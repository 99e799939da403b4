"""Tests that run in several processes (tests/processes/plugin.py) give what they give in one."""

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.processes.shares import Shares

CONFTEST = """
import os
import pathlib
import pytest

pytest_plugins = ["tests.processes.plugin"]
HERE = pathlib.Path(__file__).parent

@pytest.fixture(scope="session", autouse=True)
def ends():
    (HERE / f"began-{os.getpid()}").touch()
    yield
    (HERE / f"ended-{os.getpid()}").touch()
"""

TESTS = """
import os
import pathlib
import time
import pytest

HERE = pathlib.Path(__file__).parent

@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return os.getpid(), tmp_path_factory.mktemp("shared")

@pytest.mark.parametrize("n", range(20))
def test_passes(n, shared, tmp_path):
    pid, folder = shared
    assert pid == os.getpid()
    assert folder.parent == tmp_path.parent
    print("said by a test that passes")
    time.sleep(0.02)

def test_fails():
    print("said by a test that fails")
    assert os.getpid() == 0

@pytest.mark.skip(reason="for a reason")
def test_is_skipped():
    pass
"""

WAITING = """
import time
import pytest

@pytest.mark.parametrize("n", range(6))
def test_waits(n):
    time.sleep(60)
"""


def pytest_of(folder: Path, *options: str) -> list[str]:
    """A command of pytest for the tests of a folder. Without a cache."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(folder / "base")]
    return [*command, "--processes", "3", *options, str(folder)]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return {**kept, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(Path(__file__).parents[2])}


def run_pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        pytest_of(folder, *options), cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )


def write(folder: Path, **files: str) -> None:
    for name, text in {"conftest": CONFTEST, **files}.items():
        (folder / f"{name}.py").write_text(text)


def test_each_test_runs_once_and_is_counted(tmp_path: Path) -> None:
    write(tmp_path, test_one=TESTS, test_two=TESTS, test_three=TESTS)
    done = run_pytest(tmp_path)
    assert done.returncode == 1
    assert "3 failed, 60 passed, 3 skipped" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("said by a test that fails\n") == 3
    assert "said by a test that passes" not in done.stdout
    began, ended = (sorted(path.name[6:] for path in tmp_path.glob(f"{what}-*")) for what in ("began", "ended"))
    assert len(began) == 3
    assert began == ended, "session fixtures end"
    folders = [path.name for path in (tmp_path / "base").iterdir()]
    assert sorted(folders) == [f"p{pid}" for pid in began]


def test_a_process_that_dies_fails_its_test_alone(tmp_path: Path) -> None:
    dying = "def test_dies():\n    import os\n    os.kill(os.getpid(), 9)\n"
    write(tmp_path, test_one=TESTS, test_two=f"{dying}{TESTS}")
    done = run_pytest(tmp_path)
    assert "3 failed, 40 passed, 2 skipped" in done.stdout, done.stdout + done.stderr
    assert "the process that ran this test ended with status -9" in done.stdout
    assert len(list(tmp_path.glob("began-*"))) == 4


def test_the_first_failure_is_the_last(tmp_path: Path) -> None:
    write(tmp_path, test_one="def test_it():\n    assert 0\n", test_two=TESTS)
    done = run_pytest(tmp_path, "-x")
    assert done.returncode == 1
    assert "stopping after 1 failures" in done.stdout, done.stdout + done.stderr
    (passed,) = re.findall(r"(\d+) passed", done.stdout) or ["0"]
    assert int(passed) < 20


def test_fixtures_end_if_the_run_is_interrupted(tmp_path: Path) -> None:
    write(tmp_path, test_one=WAITING)
    process = subprocess.Popen(
        pytest_of(tmp_path),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    end = time.monotonic() + 60
    while len(list(tmp_path.glob("began-*"))) < 3 and time.monotonic() < end:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    said = process.communicate(timeout=60)[0]
    assert process.returncode == pytest.ExitCode.INTERRUPTED, said
    assert "Traceback" not in said
    began, ended = (sorted(path.name[6:] for path in tmp_path.glob(f"{what}-*")) for what in ("began", "ended"))
    assert len(began) == 3
    assert began == ended


@pytest.mark.parametrize("seed", range(5))
def test_shares_are_all_tests_once_in_any_order(seed: int) -> None:
    chance = random.Random(seed)
    files = [str(number) for number in range(12) for _ in range(chance.randrange(1, 30))]
    done: list[int] = []
    announced: dict[int, int | None] = {}
    alive = [0, 1, 2]
    with tempfile.TemporaryFile() as shared:
        shares = Shares(files, 3, shared)
        while alive:
            number = chance.choice([*alive, alive[0]])  # one is faster
            places = shares.advance(number)
            if places is None:
                alive.remove(number)
                continue
            assert announced.get(number, places[0]) == places[0] == shares.running(number)
            done.append(places[0])
            announced[number] = places[1]
    assert sorted(done) == list(range(len(files)))
    assert set(announced.values()) == {None}


def test_shares_are_cut_between_files() -> None:
    with tempfile.TemporaryFile() as shared:
        files = [*"aaaaaabbbbccdddddd"]
        shares = Shares(files, 2, shared)
        firsts = [shares.advance(number) for number in (0, 1)]
        assert firsts == [(0, 1), (10, 11)]
        while shares.advance(1) not in ((17, 6), None):  # the rest of the other is 2 to 9, and 6 is where a file begins
            pass
        assert shares.running(1) == 17
        shares.clear()
        assert shares.advance(1) == (6, None)
        assert shares.advance(1) is None
        assert shares.advance(0) == (1, None)
