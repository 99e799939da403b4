"""Builds the C kernels of every variant that this CPU runs: `make test` does it while mypy has the other core."""

import contextlib

from kernels.cpu.build import CpuLibraryError, runnable_variants
from kernels.cpu.library_file import find_library

if __name__ == "__main__":
    for variant in runnable_variants():
        with contextlib.suppress(CpuLibraryError):  # the tests say what cannot be built
            find_library(variant)
