"""Products in 8 bits on ARM64 have the bits of their definition: NEON, SDOT and SMMLA under QEMU, without a Python."""

from pathlib import Path

import pytest

from tests.arm.programs import VARIANT_NAMES, lines_of_program, needs_emulator

PROGRAM = Path(__file__).with_name("unpacked_groups.c")

pytestmark = needs_emulator


@pytest.mark.timeout(300)
@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_products_with_unpacked_groups_have_the_bits_of_the_definition(variant: str, tmp_path: Path) -> None:
    rows = 4 if variant == "neon_dot" else 6  # INT8_ROWS
    assert lines_of_program(tmp_path, variant, [PROGRAM]) == 4 * rows


@pytest.mark.soak
@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_products_with_packed_groups_have_the_bits_of_the_definition(variant: str, tmp_path: Path) -> None:
    rows, packed_rows = {"neon": (6, 4), "neon_dot": (4, 4), "neon_bf16": (6, 8)}[variant]  # INT8_ROWS, ..._PACKED_ROWS
    assert lines_of_program(tmp_path, variant, [PROGRAM], "-DWITH_PACKED=1") == 4 * rows + 17 * packed_rows
