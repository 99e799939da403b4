"""Programs in C that QEMU runs without a Python: they compare kernels of one variant with their definition."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.cpu.build import ARM, FLAGS, SOURCE_FOLDER, VARIANTS, variants_of
from tests.arm.system import COMPILER

EMULATOR = "qemu-aarch64"
VARIANT_NAMES = [name for name in variants_of(ARM) if VARIANTS[name].needs]

needs_emulator = pytest.mark.skipif(
    shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None,
    reason="needs Debian's gcc-aarch64-linux-gnu and qemu-user",
)


def _command(variant: str, *flags: str) -> list[str]:
    return [COMPILER, *FLAGS, *VARIANTS[variant].flags, *flags, "-I", str(SOURCE_FOLDER)]


def preprocessed(variant: str, sources: list[Path]) -> bytes:
    """Return the sources as the compiler of a variant sees them, after their macros."""
    command = [*_command(variant, "-E", "-P"), *map(str, sources)]
    return subprocess.run(command, check=True, capture_output=True).stdout


def lines_of_program(folder: Path, variant: str, sources: list[Path], *flags: str) -> int:
    """Compile a program for a variant, run it, and return how many of its lines say that nothing is wrong."""
    program = folder / "program"
    command = [*_command(variant, *flags, "-Wno-unused-function", "-static"), *map(str, sources)]
    subprocess.run([*command, "-lm", "-o", str(program)], check=True)
    done = subprocess.run([EMULATOR, "-cpu", "max", str(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.count(": 0 wrong")
