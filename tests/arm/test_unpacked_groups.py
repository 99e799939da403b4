"""Products in 8 bits on ARM64 have the bits of their definition: NEON, SDOT and SMMLA under QEMU, without a Python."""

from pathlib import Path

import pytest

from tests.arm.programs import VARIANT_NAMES, lines_of_program, needs_emulator

PROGRAM = Path(__file__).with_name("unpacked_groups.c")

PACKED_ROWS, NUM_TYPES = 4, 17  # INT8_PACKED_ROWS; types that have functions

pytestmark = needs_emulator


def unpacked_lines(variant: str) -> int:
    """Return the lines about unpacked groups: with SDOT and SMMLA, rows_together.c has them."""
    return 4 * 6 if variant == "neon" else 0  # INT8_ROWS


@pytest.mark.timeout(300)
@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_products_with_groups_have_the_bits_of_the_definition(variant: str, tmp_path: Path) -> None:
    assert lines_of_program(tmp_path, variant, [PROGRAM]) == unpacked_lines(variant) + 4 * PACKED_ROWS


@pytest.mark.soak
@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_products_with_packed_groups_of_all_types_have_the_bits_of_the_definition(
    variant: str, tmp_path: Path
) -> None:
    found = lines_of_program(tmp_path, variant, [PROGRAM], "-DALL_TYPES=1")
    assert found == unpacked_lines(variant) + NUM_TYPES * PACKED_ROWS
