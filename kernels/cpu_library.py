"""CpuLibrary: the C kernels, loaded; built on first use where no wheel brought them.

Built libraries are kept in $XDG_CACHE_HOME/engine-core/kernels (else ~/.cache/...), a folder that only its owner may
enter: what lies there runs in the engine. A file's name has the hash of what it was made of, its end the digest of its
content.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from kernels.cpu_build import (
    SOURCE_FOLDER,
    VARIANTS,
    CpuLibraryError,
    build,
    find_compiler,
    is_intact,
    source_hash,
    usable_variants,
    with_digest,
)

PREBUILT_FOLDER = SOURCE_FOLDER / "prebuilt"

#: enum in vectors.h.
ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_CHUNK_BYTES = 32 << 20
_ALIGNMENT = 64  # bytes; a cache line, and the widest vector


class CpuLibrary:
    """The kernels of one variant, and its threads. Kernels are called from one thread at a time, and know nothing of
    Python: what they are given must live until they return."""

    def __init__(self, variant: str, path: Path) -> None:
        """Errors: OSError."""
        self.variant = variant
        self._functions = ctypes.CDLL(str(path))
        self._start = self.function("pool_start", ctypes.c_int)
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def function(self, name: str, *argument_types: Any, result: Any = None) -> Callable[..., Any]:
        """An exported function. Python's lock is released while it runs."""
        function = self._functions[name]
        function.argtypes, function.restype = argument_types, result
        return function

    def start_threads(self, num_threads: int) -> None:
        """Have this many, the calling thread included. Idle threads take no CPU."""
        self._start(num_threads)

    def stop_threads(self) -> None:
        self._start(1)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8, zeros, 64-byte aligned, for what is read again and again: in huge pages (33 GB/s instead
        of 21 from memory) where the system has them. Many share a mapping, which goes with the last of them."""
        if num_bytes > len(self._chunk):
            mapping = mmap.mmap(-1, max(num_bytes, _CHUNK_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # a kernel without them
                mapping.madvise(mmap.MADV_HUGEPAGE)
            chunk = torch.frombuffer(mapping, dtype=torch.uint8)
            if num_bytes >= _CHUNK_BYTES:
                return chunk
            self._chunk = chunk
        taken, end = self._chunk[:num_bytes], -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._chunk = self._chunk[end:]
        return taken


def load_cpu_library(variant: str | None = None) -> CpuLibrary:
    """The library of this variant, else of the best that this CPU runs: from the wheel, from the cache, or built.
    Errors: CpuLibraryError."""
    usable = usable_variants()
    name = variant or usable[0]
    if name not in VARIANTS or name not in usable:
        raise CpuLibraryError(f"this CPU runs the kernels {', '.join(usable)}; not {name!r}")
    prebuilt = PREBUILT_FOLDER / f"{name}-{source_hash(name)}.so"
    if _is_intact_file(prebuilt):
        with contextlib.suppress(OSError):  # made for another C library: build one that fits
            return CpuLibrary(name, prebuilt)
    compiler = find_compiler()
    folder = _private_folder()
    path = folder / f"{name}-{source_hash(name, compiler.version)}.so"
    try:
        if not _is_intact_file(path):
            with _locked(folder / "lock"):
                if not _is_intact_file(path):  # else another process has built it meanwhile
                    _write(path, with_digest(build(name, compiler, folder)))
        return CpuLibrary(name, path)
    except OSError as error:
        raise CpuLibraryError(f"cannot load {path}: {error}") from error


def _private_folder() -> Path:
    """The cache, made if need be. Errors: CpuLibraryError if others may write there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    folder = cache / "engine-core" / "kernels"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
    except (OSError, RuntimeError) as error:
        raise CpuLibraryError(f"cannot make the folder {folder} for built kernels: {error}") from error
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or mode & 0o077:
        raise CpuLibraryError(
            f"{folder} must be a folder of user {os.geteuid()} with mode 0700, since what lies there is run; "
            f"it has owner {status.st_uid} and mode {mode:04o}: remove it, or chmod 0700"
        )
    return folder


def _is_intact_file(path: Path) -> bool:
    try:
        return is_intact(path.read_bytes())
    except OSError:
        return False


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all: others may load it at any moment. Under the lock, so one name is enough."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Among processes; a process that dies gives it back."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
