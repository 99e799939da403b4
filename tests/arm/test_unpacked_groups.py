"""Products in 8 bits on ARM64 have the bits of their definition: NEON, SDOT and SMMLA under QEMU, without a Python."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.cpu.build import ARM, FLAGS, SOURCE_FOLDER, VARIANTS, variants_of
from tests.arm.system import COMPILER

EMULATOR = "qemu-aarch64"
PROGRAM = Path(__file__).with_name("unpacked_groups.c")

pytestmark = pytest.mark.skipif(
    shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None,
    reason="needs Debian's gcc-aarch64-linux-gnu and qemu-user",
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("variant", [name for name in variants_of(ARM) if VARIANTS[name].needs])
def test_products_with_unpacked_groups_have_the_bits_of_the_definition(variant: str, tmp_path: Path) -> None:
    program = tmp_path / "program"
    flags = [*FLAGS, *VARIANTS[variant].flags, "-Wno-unused-function", "-static", "-I", str(SOURCE_FOLDER)]
    subprocess.run([COMPILER, *flags, str(PROGRAM), "-o", str(program)], check=True)
    done = subprocess.run([EMULATOR, "-cpu", "max", str(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = 4 if variant == "neon_dot" else 6  # INT8_ROWS
    assert done.stdout.count(": 0 wrong") == 4 * rows
