"""What the owner is told of a start that failed, and what standard error keeps."""

import errno

import pytest

from core.__main__ import describe_failure
from ipc.wire.start_messages import StartFailed


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")])
def test_memory_the_system_refuses_is_one_line(error: Exception, capfd: pytest.CaptureFixture[str]) -> None:
    failed = describe_failure(error)
    assert failed.error == "OutOfMemoryError"
    assert failed.message.startswith("the engine ran out of memory while it started")
    assert "\n" not in failed.message
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_files_the_system_does_not_open_are_one_line(number: int, capfd: pytest.CaptureFixture[str]) -> None:
    failed = describe_failure(OSError(number, "Too many open files"))
    assert failed.error == "EngineStartError"
    assert "cannot open more files while it starts" in failed.message
    assert "ulimit -n, here " in failed.message
    assert "\n" not in failed.message
    assert capfd.readouterr().err == ""


def test_a_bug_in_the_start_is_one_line_and_a_traceback_elsewhere(capfd: pytest.CaptureFixture[str]) -> None:
    assert describe_failure(RuntimeError("first\nlast")) == StartFailed(
        "", "RuntimeError: first (see its standard error)"
    )
    assert describe_failure(KeyError("x")) == StartFailed("", "KeyError: 'x' (see its standard error)")
    assert "RuntimeError: first\nlast" in capfd.readouterr().err
