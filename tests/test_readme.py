"""Every snippet of README.md runs as it stands, on the demo model: blocks marked `sh` and `python`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def snippets() -> list[tuple[str, str]]:
    """Return (language, text) of each block that is to run."""
    return re.findall(r"(?ms)^```(sh|python)\n(.*?)^```", (ROOT / "README.md").read_text())


@pytest.mark.parametrize("index", range(5))
def test_a_snippet_runs_as_it_stands(index: int, tmp_path: Path) -> None:
    language, text = snippets()[index]
    text = text.replace("/tmp/", f"{tmp_path}/")
    command = ["bash", "-eu", "-c", text] if language == "sh" else [sys.executable, "-c", text]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip(), done.stderr[-2000:]


def test_there_are_as_many_as_are_run() -> None:
    assert [language for language, _ in snippets()] == ["sh", "python", "python", "sh", "sh"]
