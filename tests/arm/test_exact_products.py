"""Products with quantized weights on ARM64 have the bits of the dequantized matrix: under QEMU, without a Python."""

from pathlib import Path

import pytest

from kernels.cpu.build import SOURCE_FOLDER
from tests.arm.programs import VARIANT_NAMES, lines_of_program, needs_emulator, preprocessed

PROGRAM = Path(__file__).with_name("exact_products.c")
FILES = ("products/quantized.c", "products/quantized_pack.c", "blocks/dequantize.c")
SOURCES = [PROGRAM, *(SOURCE_FOLDER / name for name in FILES)]
NUM_TYPES = 27  # of block_types.h
#: Two variants have the same code of exact products, which takes 10 s to compile.
VARIANTS = [pytest.param(name, marks=[pytest.mark.soak] if name == "neon_dot" else []) for name in VARIANT_NAMES]

pytestmark = needs_emulator


@pytest.mark.timeout(300)
@pytest.mark.parametrize("variant", VARIANTS)
def test_products_with_each_type_have_the_bits_of_the_definition(variant: str, tmp_path: Path) -> None:
    assert lines_of_program(tmp_path, variant, SOURCES) == NUM_TYPES


def test_the_variant_that_is_left_out_has_the_code_of_another() -> None:
    texts = {variant: preprocessed(variant, SOURCES) for variant in VARIANT_NAMES}
    assert texts["neon_dot"] == texts["neon"] != texts["neon_bf16"]
