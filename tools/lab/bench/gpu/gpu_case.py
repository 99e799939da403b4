"""Case: a kernel on a GPU, measured next to torch's own operation."""

from collections.abc import Callable
from typing import NamedTuple


class Case(NamedTuple):
    """One kernel on one shape, and torch's operation for the same work."""

    kernel: str
    shape: str
    run: Callable[[], object]
    theirs: str
    torch_run: Callable[[], object]
    num_bytes: float  # read and written at least once
    num_flops: float
