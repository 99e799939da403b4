"""Processes of our packages, forked from one that has imported their modules: a start takes 20 ms of CPU time, not 300.

The tests start hundreds of engines, workers, HTTP workers and commands. Within `preloaded_starts()` the subprocess
module has those of this process forked by another (tests/preloaded/forker.py). What is started is a child of this
process, as with exec, with the same arguments, environment, directory, descriptors and signal mask. A command has a
forker of its own, for every other engine, HTTP worker or worker. All else is started with exec: other programs, other
settings of the interpreter or the loader, what the other processes start, and everything if EXEC is in the environment.
"""

import array
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

EXEC = "ENGINE_CORE_TESTS_EXEC"
ROOT = Path(__file__).resolve().parents[2]

_EMULATED = ("tests.triton_device", "core.executors.cuda", "core.workers.device_part")
#: What is forked, and the modules that its forker has imported in addition to those of all.
_PACKAGES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("core", "core.capture.write_flight", "core.workers", "engine_core", "frontend.http"), ()),
    **dict.fromkeys(("tests.core.emulated", "tests.core.workers.emulated"), _EMULATED),
}
#: Variables that are read before a program's first line.
_EARLY = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "OPENBLAS_", "TZ")
#: Variables of malloc, and the parameters of mallopt(3) that stand for them in a forked process.
MALLOPT = {"MALLOC_ARENA_MAX": -8, "MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_TRIM_THRESHOLD_": -1}
_LIMITS = [value for name, value in vars(resource).items() if name.startswith("RLIMIT_")]


class _Asked(NamedTuple):
    """The arguments of _posixsubprocess.fork_exec."""

    words: list[str]
    executables: Sequence[bytes]
    close_fds: bool
    fds: tuple[int, ...]
    cwd: str | None
    env: list[bytes] | None
    p2cread: int
    p2cwrite: int
    c2pread: int
    c2pwrite: int
    errread: int
    errwrite: int
    errpipe_read: int
    errpipe_write: int
    restore_signals: bool
    session: bool
    group: int
    gid: int | None
    gids: list[int] | None
    uid: int | None
    umask: int
    preexec: object


class Forker:
    """A process that forks others, for one setting of the interpreter, and the socket to it."""

    def __init__(self, asking: socket.socket, process: "subprocess.Popen[bytes] | None" = None) -> None:
        self._socket, self._process = asking, process

    def fork(self, request: Mapping[str, object], fds: Sequence[int]) -> int:
        """Return the process id. Errors: OSError."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        try:
            self._socket.sendmsg([json.dumps(request).encode()], rights)
            pid = int(self._socket.recv(100) or b"0")
        except BaseException:
            self._socket.close()  # the answer would be taken for that of a later request
            raise
        if pid <= 0:
            raise OSError(-pid, "not forked")
        return pid

    def close(self) -> None:
        self._socket.close()
        if self._process is not None:
            self._process.wait()


def _new_forker(env: Mapping[str, str], modules: tuple[str, ...]) -> Forker:
    ours, theirs = forker_sockets()
    env = {name: value for name, value in env.items() if name not in MALLOPT}
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.preloaded import forker; "
    program += f"forker.run({theirs.fileno()}, {modules}) #"
    command = [sys.executable, "-c", program + " " * 400]  # room for a forked process's own command line
    fds, started = (theirs.fileno(),), list[subprocess.Popen[bytes]]()

    def start() -> None:
        started.append(subprocess.Popen(command, env=env, cwd="/", pass_fds=fds, stdin=subprocess.DEVNULL))

    # The parent of a process is a thread. A worker asks to die with it, and what is forked has the forker's: by the end
    # of this one that is the main thread, not one that another test's workers end with.
    thread = threading.Thread(target=start)
    with theirs:
        thread.start()
        thread.join()
    return Forker(ours, started[0])


def forker_sockets() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Starts:
    """Decides which processes are forked.

    own: the only forker, which takes turns with exec; None = as many forkers as are needed. Two forkers of a setting
    take turns: an engine and the one that follows it have other seeds of hashes and other addresses, as with exec.
    """

    def __init__(self, own: Forker | None = None) -> None:
        self.usual = subprocess._fork_exec  # type: ignore[attr-defined]
        self._owner, self._python, self._lock = os.getpid(), sys.executable, threading.Lock()
        self._own, self._own_setting, self._started = own, _setting(os.environ), Counter[str]()
        self._forkers: dict[tuple[str, tuple[str, ...]], list[Forker]] = {}

    def start(self, *arguments: Any) -> int:
        """Start a process, in place of _posixsubprocess.fork_exec. Return its id."""
        asked = _Asked(*arguments[: len(_Asked._fields)])
        if self._is_forked(asked):
            with contextlib.suppress(OSError, ValueError):  # exec names the reason
                return self._fork(asked)
        return int(self.usual(*arguments))

    def close(self) -> None:
        for forkers in self._forkers.values():
            for forker in forkers:
                forker.close()

    def _is_forked(self, asked: _Asked) -> bool:
        words = asked.words
        if os.getpid() != self._owner or words[:1] != [self._python] or not asked.close_fds:
            return False
        if any(other not in (None, -1) for other in (asked.gid, asked.gids, asked.uid, asked.umask, asked.preexec)):
            return False
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # inherited by exec, which other handlers end with
            return False
        rest = words[2:] if words[1:2] == ["-P"] else words[1:]
        return len(rest) > 1 and rest[0] == "-m" and rest[1] in _PACKAGES

    def _fork(self, asked: _Asked) -> int:
        if asked.env is None:
            env = dict(os.environ)
        else:
            pairs = (os.fsdecode(pair).partition("=") for pair in asked.env)
            env = {name: value for name, _, value in pairs}
        if EXEC in env:
            raise ValueError(EXEC)
        streams = [asked.p2cread, asked.c2pwrite, asked.errwrite]
        streams = [number if fd == -1 else fd for number, fd in enumerate(streams)]
        fds = sorted(set(asked.fds) - {asked.errpipe_write})
        request = {
            "words": asked.words,
            "env": env,
            "cwd": os.fspath(asked.cwd or os.getcwd()),
            "fds": [0, 1, 2, *fds],
            "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
            "session": asked.session,
            "group": asked.group,
        }
        with self._lock:
            return self._forker(asked.words, env).fork(request, [*streams, *fds])

    def _forker(self, words: list[str], env: Mapping[str, str]) -> Forker:
        setting, package = _setting(env), words[words.index("-m") + 1]
        modules = _PACKAGES[package]
        if self._own is not None:
            if setting != self._own_setting or modules:
                raise ValueError(package)
            self._started[package] += 1
            if self._started[package] % 2 == 0:
                raise ValueError(package)
            return self._own
        forkers = self._forkers.setdefault((setting, modules), [])
        if len(forkers) < (1 if modules else 2):  # torch takes seconds
            forkers.insert(0, _new_forker(env, modules))
        else:
            forkers.reverse()
        return forkers[0]


def _setting(env: Mapping[str, str]) -> str:
    """What a forked process takes over from its forker."""
    later = {"PYTHONPATH", *MALLOPT}
    early = sorted((name, value) for name, value in env.items() if name.startswith(_EARLY) and name not in later)
    return json.dumps([early, [resource.getrlimit(limit) for limit in _LIMITS]])


@contextlib.contextmanager
def preloaded_starts() -> Iterator[None]:
    """Within this context, processes of our packages are forked if they can be."""
    starts = Starts()
    subprocess._fork_exec = starts.start  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess._fork_exec = starts.usual  # type: ignore[attr-defined]
        starts.close()
