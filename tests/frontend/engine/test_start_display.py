"""What a user sees while an engine starts: a line on a terminal, nothing in a pipe."""

import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

from core.model_files import progress
from frontend.engine.start_display import StartDisplay
from tests.placed import placed

CODE = "from engine_core import LLM; LLM(executor='fake').close()"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_llm_shows_the_phases_of_its_start(is_terminal: bool) -> None:
    ours, theirs = pty.openpty() if is_terminal else os.pipe()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "COLUMNS": "60"}
    done = subprocess.run([sys.executable, "-c", placed(CODE)], env=environment, stderr=theirs, check=False)
    if not is_terminal:
        os.close(theirs)
    shown = "" if is_terminal else os.read(ours, 65_536).decode()
    if is_terminal:
        while select.select([ours], [], [], 0.2)[0]:
            shown += os.read(ours, 65_536).decode()
        os.close(theirs)
        assert "\r\x1b[Kengine-core: starting the engine: load model (" in shown
        assert shown.endswith("\r\x1b[K"), "the line goes away"
    else:
        assert shown == ""
    os.close(ours)
    assert done.returncode == 0


def test_after_its_end_a_display_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with StartDisplay(is_quiet=True) as quiet:
            quiet("import", 1.0)
        with StartDisplay() as display:
            display("import", 1.0)
        display("import", 2.0)  # a later start of the same engine
        shown = ""
        while shown.count("\x1b[K") < 2:  # a terminal gives what it has
            shown += os.read(ours, 1000).decode()
        assert shown == "\r\x1b[Kengine-core: starting the engine: import (1.0 s)\r\x1b[K"
    os.close(ours)


def test_the_share_of_the_weights_is_told_once_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 0.5, 1.0, 1.0, 1.5, 2.5, 2.5])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    shapes = {"a": (10, 5), "b": (30,), "c": (10,), "d": (10,)}
    shares: list[float] = []
    with progress.following(shares.append):
        assert list(progress.counted(((name, 0) for name in shapes), shapes)) == [(name, 0) for name in shapes]
    assert shares == [0.8, 1.0]
    monkeypatch.undo()
    assert len(list(progress.counted(((name, 0) for name in shapes), shapes))) == 4  # nobody follows
