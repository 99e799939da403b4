"""Child processes: one of our packages, run by name with exec."""

import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

import ipc
from ipc.errors import EngineStartError

#: "" in a checkout, "engine_core." in an installed wheel.
HOME_PACKAGE = ipc.__name__.removesuffix("ipc")


def run_package(
    package: str, arguments: Sequence[str], pass_fds: Sequence[int], defaults: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Start `python -m package *arguments` and return at once.

    package: one of ours, by its name in a checkout, such as "core". SIGINT is blocked in the child until it unblocks
    it. pass_fds: open descriptors that the child gets under the same numbers. defaults: environment variables that the
    user may override. Errors: OSError; EngineStartError if there is no interpreter.
    """
    if not sys.executable:
        raise EngineStartError("sys.executable is empty: the engine needs a Python interpreter to start")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited until the child ignores it
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", f"{HOME_PACKAGE}{package}", *arguments],
            pass_fds=pass_fds,
            stdin=subprocess.DEVNULL,
            stdout=inherited_stream(1),
            stderr=inherited_stream(2),
            env=child_environment(defaults),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def inherited_stream(fd: int) -> int | None:
    """Return a child's standard output (1) or error (2), for Popen: ours if we have it."""
    return None if _is_inherited(fd) else subprocess.DEVNULL


def _is_inherited(fd: int) -> bool:
    """Return whether a standard stream is open and inheritable.

    It is False also if another file has its number now.
    """
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False


def child_environment(defaults: Mapping[str, str]) -> dict[str, str]:
    """Return the child's environment. Variables that the user has set keep their values."""
    environment = {**defaults, **os.environ}
    home = _home()
    if home is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    return environment


def _home() -> str | None:
    """Return the directory of our packages if they are not installed (a checkout), otherwise None.

    site-packages is left out: on PYTHONPATH it would come before the standard library.
    """
    assert ipc.__file__ is not None
    home = str(Path(ipc.__file__).resolve().parents[1 + ipc.__name__.count(".")])
    installed = {str(Path(sysconfig.get_path(name)).resolve()) for name in ("purelib", "platlib")}
    return None if home in installed else home


def describe_exit(code: int | None) -> str:
    """Return how a process with this return code ended, as text to follow "the process"; None: it runs."""
    if code is None:
        return "is running"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
