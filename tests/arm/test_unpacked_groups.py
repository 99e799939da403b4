"""Products in 8 bits on ARM64 have the bits of their definition: NEON, SDOT and SMMLA under QEMU, without a Python."""

from pathlib import Path

import pytest

from tests.arm.programs import VARIANT_NAMES, lines_of_program, needs_emulator

PROGRAM = Path(__file__).with_name("unpacked_groups.c")

NUM_TYPES = 17  # that have functions

pytestmark = needs_emulator


def num_lines(variant: str, types: int) -> int:
    """Return the program's lines. With SDOT and SMMLA, rows_together.c is about unpacked groups."""
    return 4 * 6 + types * 4 if variant == "neon" else types * 3  # INT8_ROWS, INT8_PACKED_ROWS


@pytest.mark.timeout(300)
@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_products_with_groups_have_the_bits_of_the_definition(variant: str, tmp_path: Path) -> None:
    assert lines_of_program(tmp_path, variant, [PROGRAM]) == num_lines(variant, 4)


@pytest.mark.soak
@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_products_with_packed_groups_of_all_types_have_the_bits_of_the_definition(variant: str, tmp_path: Path) -> None:
    assert lines_of_program(tmp_path, variant, [PROGRAM], "-DALL_TYPES=1") == num_lines(variant, NUM_TYPES)
