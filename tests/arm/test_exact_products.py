"""Products with quantized weights on ARM64 have the bits of the dequantized matrix: under QEMU, without a Python."""

from pathlib import Path

import pytest

from kernels.cpu.build import SOURCE_FOLDER
from tests.arm.programs import VARIANT_NAMES, lines_of_program, needs_emulator

PROGRAM = Path(__file__).with_name("exact_products.c")
FILES = ("products/quantized.c", "products/quantized_pack.c", "blocks/dequantize.c")
NUM_TYPES = 27  # of block_types.h

pytestmark = needs_emulator


@pytest.mark.timeout(300)
@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_products_with_each_type_have_the_bits_of_the_definition(variant: str, tmp_path: Path) -> None:
    assert lines_of_program(tmp_path, variant, [PROGRAM, *(SOURCE_FOLDER / name for name in FILES)]) == NUM_TYPES
