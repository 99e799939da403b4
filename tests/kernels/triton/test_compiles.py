"""Every Triton kernel compiles to machine code for a Hopper GPU; the interpreter would let pass what does not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kernels.triton
from kernels.cpu.library_file import private_folder

ROOT = Path(__file__).parents[3]


def compiled(folder: Path, *arguments: str, seconds: int) -> set[str]:
    """Names of kernels."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_DISABLE_LINE_INFO": "1",  # a quarter of the time; the instructions are the same
        "TRITON_CACHE_DIR": str(folder),
        "PYTHONPATH": str(ROOT),
    }
    # A warning is an error in a test, and on a GPU tests compile kernels.
    command = [sys.executable, "-W", "error", "-m", "tests.kernels.triton.compile_triton", *arguments]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


@pytest.mark.timeout(400)  # a minute of CPU time
def test_every_kernel_compiles_for_a_device() -> None:
    """What an earlier run compiled, of any checkout, is not compiled again: Triton names the files of its cache by the
    kernel's sources, the types, constants and options, and its own version."""
    launched = set()
    for path in Path(kernels.triton.__path__[0]).rglob("*.py"):
        launched |= set(re.findall(r"(?m)^ +(\w+_kernel)\[", path.read_text()))
    assert compiled(private_folder("triton-tests"), seconds=360) == launched


@pytest.mark.soak
def test_attention_compiles_for_all_sizes_and_devices(tmp_path: Path) -> None:
    assert {"decode_kernel", "prefill_kernel"} <= compiled(tmp_path, "every", seconds=1500)
