"""Suite-wide: nothing may be left behind. Each process that runs tests checks itself at its end."""

import atexit
import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.preloaded.start import preloaded_starts

# Triton's kernels run under its interpreter, which is chosen when triton is imported, by whatever imports it first.
# `make gpu` sets it to 0 and runs the tests that need a device.
os.environ.setdefault("TRITON_INTERPRET", "1")

# OpenMP's threads spin while they wait, and several pytest processes with torch on two cores spin in each other's way.
# So torch has one thread unless a test sets more, and those spin for a short time. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "100")

# numpy's BLAS starts a thread for each core when it is imported, a tenth of the time in which an engine, a server or a
# client starts. The tests start about a thousand of them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Where no bytecode is to be written, pytest prepares every module of tests again in each worker (10 s), and each of the
# hundreds of engines, servers and clients that the tests start compiles our modules: 0.2 of its 0.45 s.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Who starts the suite in the background may have it ignore Ctrl-C, and all that it starts; some tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.processes.plugin"]

_MARK = "ENGINE_CORE_TEST_PROCESS"  # in the environment of everything that a test starts, children of children too
# A child of Python's own, which ends with its parent. From Python 3.14 on, the lock of tqdm's bars starts it.
_TRACKER = "multiprocessing.resource_tracker"
_ENDING_S = 5.0  # seconds that processes and threads get to end after the last test


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, which looked through what stays 22 times, 5 s long. It leaves that alone
    afterwards too. And without the threads of tokenizers, which processes forked afterwards would lack."""
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TOKENIZERS_PARALLELISM", "false")
            return (yield)
    finally:
        gc.enable()
        gc.freeze()
        atexit.register(gc.unfreeze)  # extension modules report what is left at the end


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails the session when a process, a socket, lock or temporary file, or a thread outlives it."""
    pytest_folder = tmp_path_factory.getbasetemp()  # stays where it would be
    folder = tempfile.mkdtemp(prefix="ec-")  # short: socket paths have a limit of 107 bytes
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    threads_before = set(threading.enumerate())
    runtime_before = _runtime_files()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", None)  # read TMPDIR again
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(pytest_folder / "inductor"))  # transformers makes it when imported
        patch.setenv("XDG_STATE_HOME", str(pytest_folder / "state"))  # where dead engines' last records go
        patch.setenv(_MARK, mark)
        with preloaded_starts():
            yield
        gc.collect()  # an error of what it ends is an error of the last test

    def look() -> list[str]:
        files = [*Path(folder).rglob("*"), *(_runtime_files() - runtime_before)]
        return [*_processes(mark), *_threads(threads_before), *(f"file {file}" for file in sorted(files))]

    end = time.monotonic() + _ENDING_S
    while (found := look()) and time.monotonic() < end:
        time.sleep(0.05)
    shutil.rmtree(folder)
    assert not found, "left behind: " + "; ".join(found)


@pytest.fixture(scope="session", autouse=True)
def a_library_is_found_once() -> Iterator[None]:
    """Hashing the sources of the C kernels and their library takes 15 to 20 ms of CPU time, and tests load it for
    thousands of models. Tests about that set another place, compiler or function: these search."""
    from kernels.cpu import build, library, library_file  # numpy, for which the variables above are set

    places, variables = (library_file, build), ("XDG_CACHE_HOME", "HOME", "CC", "PATH")
    names = ("PREBUILT_FOLDER", "SOURCE_FOLDER", "find_compiler", "runnable_variants", "usable_variants", "source_hash")

    def setting() -> list[object]:
        return [*map(os.environ.get, variables), *(getattr(place, name, None) for place in places for name in names)]

    usual, find, found = setting(), library_file.find_library, dict[tuple[str | None, bool], library_file.LibraryFile]()

    def find_once(variant: str | None = None, *, use_prebuilt: bool = True) -> library_file.LibraryFile:
        if setting() != usual:
            return find(variant, use_prebuilt=use_prebuilt)
        if (variant, use_prebuilt) not in found:
            found[variant, use_prebuilt] = find(variant, use_prebuilt=use_prebuilt)
        return found[variant, use_prebuilt]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "find_library", find_once)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems() -> None:
    """Before hypothesis's own hook: it would parse every loaded file of this checkout for constants to try, for 7 s.
    And the examples of a test would depend on the modules that other tests have imported."""
    with contextlib.suppress(ImportError):  # of a version that looks for none
        if "hypothesis" in sys.modules:
            from hypothesis.internal.conjecture import providers

            providers.is_local_module_file = lambda path: False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, None, None]:
    """Fail a test that leaves Ctrl-C ignored or blocked in this process, for the tests after it."""
    try:
        yield
    finally:
        handler, blocked = signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, ())
        signal.signal(signal.SIGINT, signal.default_int_handler)
        assert handler is signal.default_int_handler, f"SIGINT is left to {handler}"
        assert signal.SIGINT not in blocked, f"SIGINT is left blocked, with {blocked}"


def _processes(mark: str) -> list[str]:
    """Our children, zombies too, and whatever else runs with our mark in its environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            name, fields = (entry / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
            is_child = int(fields.split()[1]) == os.getpid()
            if is_child or f"{_MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if not (is_child and _TRACKER in command):
                    found.append(f"process {entry.name} {name} {fields.split()[0]} {command}")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def _threads(before: set[threading.Thread]) -> list[str]:
    return [f"thread {thread.name}" for thread in threading.enumerate() if thread not in before and not thread.daemon]


def _runtime_files() -> set[Path]:
    """Ours under XDG_RUNTIME_DIR, where sockets go if it is set."""
    folder = os.environ.get("XDG_RUNTIME_DIR")
    return set(Path(folder).glob("engine-core-*")) if folder else set()
