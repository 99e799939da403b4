"""The process that forks others (tests/preloaded/start.py): it imports their modules and waits for requests.

A process that it forks is a child of the process that asked for it, not of this one, so that whoever waits for it, or
looks at its parent, finds what exec would give.
"""

import array
import contextlib
import ctypes
import errno
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from tests.preloaded.start import MALLOPT, Forker, Starts, forker_sockets

_MODULES = (
    "core.__main__",
    "core.capture.flight_file",
    "core.executors.fake",
    "core.executors.local",
    "core.workers.__main__",
    "engine_core.__main__",
    "frontend.async_llm",
    "frontend.http.__main__",
    "frontend.llm",
    "numpy.ma",
    "tools.commands.generate",
    "tools.commands.serve",
)
_SYS_CLONE3 = 435
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_PR_GET_TID_ADDRESS = 40
_MAX_FDS = 64


class _CloneArgs(ctypes.Structure):
    """struct clone_args of clone3(2), its first version."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("flags", "pidfd", "child_tid", "parent_tid", "exit_signal", "stack", "stack_size", "tls")
    ]


def run(control: int, modules: tuple[str, ...]) -> None:
    """Fork at each request of a socket until it ends. In a forked process, return when its program has run.

    modules: those that it imports in addition to _MODULES.
    """
    for name in (*_MODULES, *modules):
        with contextlib.suppress(ImportError):  # an environment without optional packages
            importlib.import_module(name)
    for name in [name for name in sys.modules if name.endswith((".__main__", ".write_flight"))]:
        del sys.modules[name]  # runpy would warn of it
    gc.collect()
    gc.freeze()
    del sys.path[:2]  # the checkout, by which this module was found, and the directory
    words = _forked(socket.socket(fileno=control), _without_python_path(os.environ, sys.path))
    runpy._run_module_as_main(words[words.index("-m") + 1])  # type: ignore[attr-defined]


def _forked(asking: socket.socket, path: list[str]) -> list[str]:
    """Fork at each request. Return in a forked process only, with its command line. path: without PYTHONPATH."""
    while True:
        data, fds = _receive(asking)
        if not data:
            os._exit(0)
        request = json.loads(data)
        pid = _fork() if len(os.listdir("/proc/self/task")) == 1 else -errno.EAGAIN  # threads would be missing in it
        if pid == 0:
            break
        for fd in fds:
            os.close(fd)
        asking.send(str(pid).encode())
    asking.close()
    words: list[str] = request["words"]
    _become(request, fds, path)
    if "engine_core" not in words:
        return words
    ours, theirs = forker_sockets()
    if os.fork() == 0:
        ours.close()
        _stand_back(request["fds"])
        return _forked(theirs, path)
    theirs.close()
    subprocess._fork_exec = Starts(Forker(ours)).start  # type: ignore[attr-defined]
    return words


def _stand_back(fds: list[int]) -> None:
    """In a command's forker: have nothing of the command that somebody waits for the end of."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    _write_command_line(["preloaded", "forker"])
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in fds:
        os.dup2(nothing, fd) if fd < 3 else os.close(fd)
    os.close(nothing)


def _without_python_path(env: Mapping[str, str], path: list[str]) -> list[str]:
    given = env.get("PYTHONPATH", "")
    return path[len(given.split(os.pathsep)) :] if given else list(path)


def _receive(asking: socket.socket) -> tuple[bytes, list[int]]:
    room = array.array("i")
    data, ancillary, _, _ = asking.recvmsg(1 << 20, socket.CMSG_SPACE(_MAX_FDS * room.itemsize))
    for _, _, sent in ancillary:
        room.frombytes(sent)
    return data, room.tolist()


def _fork() -> int:
    """Fork a sibling of this process -> its id, or 0 in it, or an error number below 0."""
    libc = ctypes.PyDLL(None)  # keeps Python's lock
    address = ctypes.c_uint64()
    libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0)  # where the C library keeps its thread's id
    flags = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID
    arguments = _CloneArgs(flags=flags, child_tid=address.value)
    ctypes.pythonapi.PyOS_BeforeFork()
    libc.syscall.restype = ctypes.c_long
    pid = int(libc.syscall(_SYS_CLONE3, ctypes.byref(arguments), ctypes.sizeof(arguments)))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return pid


def _become(request: dict[str, Any], fds: list[int], path: list[str]) -> None:
    """Take over what exec would have given."""
    if request["session"]:
        os.setsid()
    if request["group"] >= 0:
        os.setpgid(0, request["group"])
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(request["fds"]) + 1) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(moved, request["fds"], strict=True):
        os.dup2(fd, number, inheritable=True)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])
    for name, parameter in MALLOPT.items():
        if name in os.environ:
            ctypes.CDLL(None).mallopt(parameter, int(os.environ[name]))
    os.chdir(request["cwd"])
    words = request["words"]
    _write_command_line(words)
    sys.orig_argv[:] = words
    sys.argv[:] = ["-m", *words[words.index("-m") + 2 :]]
    given = request["env"].get("PYTHONPATH", "")
    sys.path[:] = [*([] if "-P" in words else [request["cwd"]]), *(given.split(os.pathsep) if given else ()), *path]
    is_unbuffered = bool(request["env"].get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = _stream(0, "r", is_unbuffered)
    sys.stdout = sys.__stdout__ = _stream(1, "w", is_unbuffered)
    sys.stderr = sys.__stderr__ = _stream(2, "w", is_unbuffered)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])


def _stream(fd: int, mode: str, is_unbuffered: bool) -> Any:
    """A standard stream as the interpreter makes it."""
    old = (sys.stdin, sys.stdout, sys.stderr)[fd]
    binary: Any = os.fdopen(fd, f"{mode}b", 0 if is_unbuffered and mode == "w" else -1, closefd=False)
    raw = getattr(binary, "raw", binary)
    raw.name = old.name
    stream = io.TextIOWrapper(
        binary,
        encoding=old.encoding,
        errors=old.errors,
        newline="\n",
        line_buffering=mode == "w" and (fd == 2 or raw.isatty()),
        write_through=is_unbuffered and mode == "w",
    )
    stream.mode = mode  # type: ignore[attr-defined]
    return stream


def _write_command_line(words: list[str]) -> None:
    """Write what /proc/PID/cmdline shows."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # fields 48 and 49 of proc(5)
    line = b"\0".join(map(os.fsencode, words)) + b"\0"
    room = end - start
    ctypes.memmove(start, line[: room - 1].ljust(room, b"\0"), room)
