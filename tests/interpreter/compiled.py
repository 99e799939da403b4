"""C programs of tests, compiled for this CPU alone."""

import ctypes
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy.typing as npt

_OPTIONS = "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared"


@cache
def compiled(source: Path) -> ctypes.CDLL:
    """Built once in each process."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / f"{source.stem}.so"
        command = [*os.environ.get("CC", "cc").split(), *_OPTIONS, "-o", target, source, "-lm"]
        subprocess.run(command, check=True, timeout=100)
        return ctypes.CDLL(str(target))


def address(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    """Return that of its first number."""
    return ctypes.c_void_p(array.__array_interface__["data"][0])
