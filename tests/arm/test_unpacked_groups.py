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


VARIANT_NAMES = [name for name in variants_of(ARM) if VARIANTS[name].needs]


def lines_of_program(folder: Path, variant: str, *flags: str) -> int:
    """Compile the program for a variant, run it, and return how many of its lines say that nothing is wrong."""
    program = folder / "program"
    own = [*FLAGS, *VARIANTS[variant].flags, *flags, "-Wno-unused-function", "-static", "-I", str(SOURCE_FOLDER)]
    subprocess.run([COMPILER, *own, str(PROGRAM), "-o", str(program)], check=True)
    done = subprocess.run([EMULATOR, "-cpu", "max", str(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.count(": 0 wrong")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_products_with_unpacked_groups_have_the_bits_of_the_definition(variant: str, tmp_path: Path) -> None:
    rows = 4 if variant == "neon_dot" else 6  # INT8_ROWS
    assert lines_of_program(tmp_path, variant) == 4 * rows


@pytest.mark.soak
@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_packed_rows_have_the_bits_of_each_row_alone(variant: str, tmp_path: Path) -> None:
    rows, packed_rows = {"neon": (6, 4), "neon_dot": (4, 4), "neon_bf16": (6, 8)}[variant]  # INT8_ROWS, ..._PACKED_ROWS
    assert lines_of_program(tmp_path, variant, "-DWITH_PACKED=1") == 4 * rows + 17 * (packed_rows - 1)
