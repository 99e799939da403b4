"""The suite-wide check of tests/conftest.py finds what it is for."""

import os
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parent / "conftest.py"

#: What it leaves ends when the file `held` is gone, the thread when the main thread has ended: after the check on any
#: machine.
LEAKY = """
import os, signal, subprocess, sys, tempfile, threading

HOLD = "import os, sys, time\\nwhile os.path.exists(sys.argv[1]): time.sleep(0.05)"
HELD = os.path.join(os.path.dirname(__file__), "held")

def test_ignores_interrupts():
    signal.signal(signal.SIGINT, signal.SIG_IGN)

def test_leaves_a_child():
    subprocess.Popen([sys.executable, "-c", HOLD, HELD, "a-child"])

def test_leaves_a_grandchild():
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]])"
    subprocess.run([sys.executable, "-c", code, HOLD, HELD, "a-grandchild"], check=True)

def test_leaves_a_file():
    os.close(tempfile.mkstemp(suffix=".forgotten")[0])

def test_leaves_a_thread():
    threading.Thread(target=threading.main_thread().join, name="forgotten-thread").start()
"""


def run_pytest(folder: Path, test: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST.read_text().replace("_ENDING_S = 5.0", "_ENDING_S = 0.5"))
    (folder / "test_leaky.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(folder / "base"), "."]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment["PYTHONPATH"] = str(CONFTEST.parents[1])
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take seconds to load
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_leaks_are_found(tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.touch()
    try:
        done = run_pytest(tmp_path, LEAKY)
    finally:
        held.unlink()
    assert "5 passed, 2 errors" in done.stdout, done.stdout + done.stderr
    for what in (
        "SIGINT is left to",
        "held a-child",
        "held a-grandchild",
        ".forgotten",
        "thread forgotten-thread",
    ):
        assert what in done.stdout, what


def test_a_clean_session_passes(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "def test_nothing():\n    pass\n")
    assert done.returncode == 0, done.stdout + done.stderr
