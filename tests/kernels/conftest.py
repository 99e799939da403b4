"""Kernel tests run on one thread unless they ask for more: threads of several test processes at once wait for each
other at every barrier, and a test takes tens of times as long."""

from collections.abc import Callable, Iterator

import pytest
import torch

from kernels.cpu.library import CpuLibrary, load_cpu_library


@pytest.fixture(autouse=True)
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of compute threads, for this test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def c_library() -> CpuLibrary:
    """The C kernels, with one thread."""
    return load_cpu_library()
