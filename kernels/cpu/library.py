"""CpuLibrary: the C kernels, loaded; built on first use where no wheel brought them."""

import contextlib
import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernels.cpu.build import CpuLibraryError
from kernels.cpu.library_file import find_library
from kernels.cpu.structs import check_structs
from kernels.rounding import round_up

#: enum in elements.h.
ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

#: Number of the C kernels' arithmetic, a part of the model's fingerprint. Raise it with every change that changes a bit
#: of any result; tests/core/runner/test_cpu_variants.py compares results with those that belong to this number.
ARITHMETIC = 1

_CHUNK_BYTES = 32 << 20
_ALIGNMENT = 64  # bytes; a cache line, and the widest vector


class CpuLibrary:
    """The kernels of one variant, and its threads. Kernels are called from one thread at a time, and know nothing of
    Python: what they are given must live until they return."""

    def __init__(self, variant: str, path: Path) -> None:
        """Errors: OSError; CpuLibraryError where its structs are not those of kernels/cpu/structs.py."""
        self.variant = variant
        self._functions = ctypes.CDLL(str(path))
        check_structs(self._functions)
        self._start = self.function("pool_start", ctypes.c_int)
        self._wake = self.function("pool_wake")
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

    def wake_threads(self) -> None:
        """A kernel comes within tens of microseconds; threads that sleep take as long to wake up."""
        self._wake()

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
        taken, end = self._chunk[:num_bytes], round_up(num_bytes, _ALIGNMENT)
        self._chunk = self._chunk[end:]
        return taken


def load_cpu_library(variant: str | None = None) -> CpuLibrary:
    """The library of this variant, else of the best that this CPU runs. Errors: CpuLibraryError."""
    found = find_library(variant)
    try:
        return CpuLibrary(found.variant, found.path)
    except OSError as error:
        if not found.is_prebuilt:
            raise CpuLibraryError(f"cannot load {found.path}: {error}") from error
    found = find_library(variant, use_prebuilt=False)  # the wheel's was made for another C library
    try:
        return CpuLibrary(found.variant, found.path)
    except OSError as error:
        raise CpuLibraryError(f"cannot load {found.path}: {error}") from error
