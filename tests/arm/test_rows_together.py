"""Rows multiplied together in 8 bits on ARM64 have the bits that each has alone: under QEMU, without a Python."""

from pathlib import Path

import pytest

from kernels.cpu.build import SOURCE_FOLDER
from tests.arm.programs import VARIANT_NAMES, lines_of_program, needs_emulator

PROGRAM = Path(__file__).with_name("rows_together.c")
NUM_CASES = 8
#: Two variants take four rows together, of which other forms are kept from panel to panel.
VARIANTS = [pytest.param(name, marks=[pytest.mark.soak] if name == "neon" else []) for name in VARIANT_NAMES]

pytestmark = needs_emulator


@pytest.mark.timeout(300)
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_together_have_the_bits_that_each_has_alone(variant: str, tmp_path: Path) -> None:
    sources = [PROGRAM, *(SOURCE_FOLDER / "products" / name for name in ("int8.c", "int8_four_rows.c"))]
    types = ("-include", str(PROGRAM.with_name("some_types.h")))
    assert lines_of_program(tmp_path, variant, sources, *types) == NUM_CASES
