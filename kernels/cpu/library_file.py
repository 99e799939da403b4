"""The C kernels' shared library as a file: from the wheel, from the cache, or built.

This module needs only the standard library, so the library can be built while other modules are imported. Built
libraries are kept in $XDG_CACHE_HOME/engine-core/kernels (by default ~/.cache/...). Only its owner may access this
folder, because the engine runs its files. A file's name contains source_hash(); its last bytes are the digest of its
content.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from kernels.cpu.build import (
    BUILD_FOLDER_PREFIX,
    BUILD_S,
    SOURCE_FOLDER,
    VARIANTS,
    CannotCompileError,
    CpuLibraryError,
    build,
    check_instructions,
    find_compiler,
    is_intact,
    runnable_variants,
    source_hash,
    usable_variants,
    with_digest,
)

PREBUILT_FOLDER = SOURCE_FOLDER.parent / "prebuilt"
_LOCK_POLL_S = 0.02


class LibraryFile(NamedTuple):
    """A shared library of the C kernels on disk."""

    variant: str
    path: Path
    is_prebuilt: bool  # it came with a wheel


def find_library(
    variant: str | None = None, *, use_prebuilt: bool = True, on_build: Callable[[], None] | None = None
) -> LibraryFile:
    """Return the file of this variant, and build it if it is missing. None = the best variant for this CPU.

    on_build: called before it is built. One process builds at a time. Waiting for another process and building take at
    most BUILD_S together. If the compiler does not support the best variant's instructions, and no wheel has it, the
    next variant's file is returned. Errors: CpuLibraryError.
    """
    if variant is not None and variant not in runnable_variants():
        raise CpuLibraryError(f"this CPU can run the kernels {', '.join(runnable_variants())}, but not {variant!r}")
    usable = usable_variants()
    name = variant or usable[0]
    end = time.monotonic() + BUILD_S
    if variant is None and VARIANTS[name].probe:
        with contextlib.suppress(CannotCompileError):
            return _find(name, use_prebuilt, on_build, end)
        name = usable[1]
    return _find(name, use_prebuilt, on_build, end)


def _find(name: str, use_prebuilt: bool, on_build: Callable[[], None] | None, end: float) -> LibraryFile:
    """Return the file of a variant that this CPU can run. `end`: deadline for building, on the monotonic clock."""
    prebuilt = PREBUILT_FOLDER / f"{name}-{source_hash(name)}.so"
    if use_prebuilt and _is_intact_file(prebuilt):
        return LibraryFile(name, prebuilt, True)
    compiler = find_compiler()
    folder = private_folder("kernels")
    path = folder / f"{name}-{source_hash(name, compiler.version)}.so"
    try:
        if not _is_intact_file(path):
            with _locked(folder / "lock", end):
                if not _is_intact_file(path):  # another process may have built it since
                    check_instructions(name, compiler, max(0.0, end - time.monotonic()))
                    _remove_leftovers(folder)
                    if on_build is not None:
                        on_build()
                    _write(path, with_digest(build(name, compiler, folder, max(0.0, end - time.monotonic()))))
    except OSError as error:
        raise CpuLibraryError(f"cannot write {path}: {error}") from error
    return LibraryFile(name, path, False)


def find_library_soon(variant: str | None = None, on_build: Callable[[], None] | None = None) -> threading.Thread:
    """Run find_library() in a thread and return the thread.

    Its errors are dropped, because loading raises them again.
    """

    def find() -> None:
        with contextlib.suppress(CpuLibraryError):
            find_library(variant, on_build=on_build)

    thread = threading.Thread(target=find, name="kernels", daemon=True)
    thread.start()
    return thread


def private_folder(name: str) -> Path:
    """Return this folder of the user's cache for this engine, created if it is missing.

    Errors: CpuLibraryError if other users may write to it.
    """
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    except RuntimeError as error:
        raise CpuLibraryError(f"no folder for {name}: neither XDG_CACHE_HOME nor a home ({error})") from error
    folder = cache / "engine-core" / name
    try:
        # a group with write permission could replace its content
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
    except OSError as error:
        raise CpuLibraryError(f"cannot make the folder {folder} for {name}: {error}") from error
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or mode & 0o077:
        raise CpuLibraryError(
            f"{folder} must be a folder of user {os.geteuid()} with mode 0700, because its files are trusted; "
            f"it has owner {status.st_uid} and mode {mode:04o}: remove it, or chmod 0700"
        )
    return folder


def _is_intact_file(path: Path) -> bool:
    try:
        return is_intact(path.read_bytes())
    except OSError:
        return False


def _write(path: Path, content: bytes) -> None:
    """Write the file atomically, because other processes may load it at any time.

    With the lock held, one name is enough.
    """
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def _remove_leftovers(folder: Path) -> None:
    """Remove the folders of builds that were killed. The lock is held, so no build is running."""
    for left in folder.glob(f"{BUILD_FOLDER_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, end: float) -> Iterator[None]:
    """Hold a lock between processes. A process that dies releases it.

    Errors: CpuLibraryError if another process still holds it at `end` on the monotonic clock.
    """
    with path.open("wb") as file:
        while not _try_lock(file.fileno()):
            if time.monotonic() > end:
                raise CpuLibraryError(f"another process is building, and holds {path} for more than {BUILD_S:g} s")
            time.sleep(_LOCK_POLL_S)
        yield


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
