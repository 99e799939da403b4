"""Products in 8 bits: the bits of their definition in every variant, for any number of rows."""

import re
import shutil
import subprocess
from collections.abc import Iterator

import gguf
import numpy as np
import pytest

from kernels.cpu.build import find_compiler, runnable_variants
from kernels.cpu.embedding import CpuEmbedding
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.library import CpuLibrary, load_cpu_library
from kernels.cpu.library_file import find_library
from kernels.cpu.packed_weights import INT8
from kernels.cpu.quantized import BlockRows, in_q8_0, quantize
from kernels.dequantize import BLOCK_SIZES, FLOAT_CODES, K_BLOCK, dequantize
from kernels.elements import BFLOAT16, FLOAT16, FLOAT32, Numbers, rounded, to_floats
from tests.kernels.block_scales import INTEGER_TYPES, set_scales
from tests.kernels.cpu.int8_reference import parts_of, product
from tests.kernels.cpu.test_quantized import DEPTH, dense, numbers, ordinary
from tests.kernels.test_dequantize import random_blocks

ROWS = [1, 2, 3, 4, 5, 7, 13, 29, 33, 140]
GGUF = gguf.GGMLQuantizationType


@pytest.fixture(scope="module", params=runnable_variants())
def variant(request: pytest.FixtureRequest) -> Iterator[CpuLibrary]:
    library = load_cpu_library(request.param)
    library.start_threads(2)
    yield library
    library.stop_threads()


@pytest.fixture(scope="module")
def best() -> Iterator[CpuLibrary]:
    library = load_cpu_library()
    library.start_threads(2)
    yield library
    library.stop_threads()


def packed(library: CpuLibrary, parts: list[BlockRows], gate: str | None = None, **options: object) -> PackedMatrix:
    stored = quantize(library, parts, is_gated=gate is not None, in_8_bits=True)
    assert stored is not None
    matrix = PackedMatrix(library, stored, gate=gate, **options)  # type: ignore[arg-type]
    assert matrix.packing == INT8
    return matrix


@pytest.mark.parametrize("name", INTEGER_TYPES)
def test_products_have_the_bits_of_the_definition(variant: CpuLibrary, name: str) -> None:
    depth = DEPTH if BLOCK_SIZES[name][0] == K_BLOCK else DEPTH - 64  # no whole number of slices
    rows = ordinary(name, 40, depth)
    matrix, x = packed(variant, [rows], out_dtype=FLOAT32), numbers(max(ROWS), depth)
    expected = product(x, parts_of(rows))
    for count in ROWS:
        assert np.array_equal(matrix(x[:count]).view(np.uint32), expected[:count].view(np.uint32)), count
    assert np.array_equal(matrix(x[5:6]), expected[5:6])  # a row's place does not matter


def test_x_may_be_float32(variant: CpuLibrary) -> None:
    rows = ordinary("Q8_0", 33)
    x = np.random.default_rng(3).standard_normal((9, DEPTH), np.float32)
    found = packed(variant, [rows], dtype=FLOAT32)(x)
    assert np.array_equal(found.view(np.uint32), product(x, parts_of(rows)).view(np.uint32))


@pytest.mark.parametrize("name", INTEGER_TYPES)
def test_the_largest_codes_do_not_overflow(variant: CpuLibrary, name: str) -> None:
    rows = ordinary(name, 32)
    rows.data[...] = 0xFF if name != "Q8_0" else 0x80  # the largest without a sign, -128 with one
    set_scales(rows.data.reshape(32, -1, BLOCK_SIZES[name][1]), name, 1.0)
    x = rounded(np.where(np.arange(DEPTH) % 64 < 48, 1.0, -1.0)[None].repeat(18, 0).astype(np.float32), BFLOAT16)
    matrix, expected = packed(variant, [rows], out_dtype=FLOAT32), product(x, parts_of(rows))
    for count in (9, 18):  # unpacked in registers, and to memory
        assert np.array_equal(matrix(x[:count]).view(np.uint32), expected[:count].view(np.uint32)), count


def unusual(name: str) -> list[BlockRows]:
    """Matrices of 48 rows: with scales of all magnitudes, and with some that are not finite."""
    weights, num_bytes = BLOCK_SIZES[name]
    rough = BlockRows(name, random_blocks(name, 48 * DEPTH // weights, seed=5).reshape(48, -1))
    broken = ordinary(name, 48)
    blocks = broken.data.reshape(48, -1, num_bytes)
    for row, scale in enumerate((np.nan, np.inf, 0.0, 2**-24, -65504.0)):
        set_scales(blocks[row : row + 1, -1], name, scale)
    for rows in (rough, broken):
        if name == "MXFP4":  # smaller scales are zeros (below)
            rows.data.reshape(48, -1, num_bytes)[..., 0].clip(2, out=rows.data.reshape(48, -1, num_bytes)[..., 0])
    return [rough, broken]


@pytest.mark.parametrize("name", INTEGER_TYPES)
def test_scales_of_any_kind_have_the_bits_of_the_definition(variant: CpuLibrary, name: str) -> None:
    """No panel depends on what bfloat16 products of a variant make of its scales."""
    for rows in unusual(name):
        stored = quantize(variant, [rows], in_8_bits=True)
        assert stored is not None
        assert not stored.has_whole_panels
        x = numbers(33)
        with np.errstate(invalid="ignore", over="ignore"):
            expected = product(x, parts_of(rows))
        for count in (1, 33):
            found = PackedMatrix(variant, stored, out_dtype=FLOAT32)(x[:count])
            assert np.array_equal(found, expected[:count], equal_nan=True), count


@pytest.mark.parametrize("name", INTEGER_TYPES)
def test_rows_of_an_embedding_are_the_dequantized_ones(variant: CpuLibrary, name: str) -> None:
    ids = np.array([47, 0, 31, 32, 1, 2, 3, 4], np.int64)
    for rows in unusual(name):
        matrix = packed(variant, [rows])
        with np.errstate(invalid="ignore", over="ignore"):
            expected = to_floats(dense([rows]))[ids]
        assert np.array_equal(CpuEmbedding(variant, matrix)(ids), expected, equal_nan=True)


def test_the_least_scales_of_mxfp4_are_zeros(variant: CpuLibrary) -> None:
    rows = ordinary("MXFP4", 32)
    rows.data.reshape(32, -1, 17)[..., 0] = np.arange(2)[:, None].repeat(16, 0)
    assert not packed(variant, [rows], out_dtype=FLOAT32)(numbers(3)).any()


def test_a_row_that_is_not_finite_or_nearly_zero_concerns_itself_alone(variant: CpuLibrary) -> None:
    rows = ordinary("Q4_0", 32)
    values = to_floats(numbers(9)).copy()
    values[1, 70], values[3, 5], values[5] = np.nan, -np.inf, 1e-38
    values[6, :32], values[7, 33] = 0.0, 3e38
    x = rounded(values, BFLOAT16)
    found, expected = packed(variant, [rows], out_dtype=FLOAT32)(x), product(x, parts_of(rows))
    assert np.isnan(found[[1, 3]]).all()
    assert not found[5].any()
    others = [0, 2, 4, 6, 7, 8]
    assert np.isfinite(found[others]).all()
    assert np.array_equal(found[others], expected[others])


def test_panels_of_several_types_are_multiplied_in_bfloat16(variant: CpuLibrary) -> None:
    parts = [ordinary("Q4_0", 48), ordinary("Q8_0", 48, seed=1), ordinary("Q6_K", 32, seed=2)]
    matrix, x = packed(variant, parts, out_dtype=FLOAT32), numbers(33)
    whole = PackedMatrix(variant, quantize(variant, parts), out_dtype=FLOAT32)  # type: ignore[arg-type]
    expected = np.concatenate([product(x, parts_of(part)) for part in parts], 1)
    for count in (1, 3, 7, 33):
        found = matrix(x[:count])
        assert np.array_equal(found[:, :32], expected[:count, :32])
        assert np.array_equal(found[:, 64:96], expected[:count, 64:96])
        assert np.array_equal(found[:, 32:64], whole(x[:count])[:, 32:64])
        assert np.array_equal(found[:, 96:], expected[:count, 96:])


def test_bias_and_gate_are_those_of_other_products(best: CpuLibrary) -> None:
    rows, x = ordinary("Q4_K", 96), numbers(5)
    y = product(x, parts_of(rows))
    bias = np.linspace(-1, 1, 96, dtype=np.float32)
    assert np.array_equal(packed(best, [rows], bias=bias)(x), rounded(y + bias, BFLOAT16))
    gated = to_floats(packed(best, [rows], gate="silu")(x))
    gate, up = to_floats(rounded(y, BFLOAT16))[:, :48], to_floats(rounded(y, BFLOAT16))[:, 48:]
    np.testing.assert_allclose(gated, gate / (1 + np.exp(-gate)) * up, rtol=0.01, atol=1e-6)


@pytest.mark.parametrize(("dtype", "name"), [(FLOAT32, "F32"), (FLOAT16, "F16"), (BFLOAT16, "BF16")])
def test_blocks_are_those_of_the_gguf_package(best: CpuLibrary, dtype: np.dtype, name: str) -> None:  # type: ignore[type-arg]
    values = np.random.default_rng(1).standard_normal((40, 128), np.float32) * np.logspace(-6, 3, 40)[:, None]
    values[3, :32], values[4, 5] = 0.0, 2.5e-7
    stored: Numbers = rounded(values.astype(np.float32), dtype)
    made = in_q8_0(best, BlockRows(name, stored.view(np.uint8)))
    assert made is not None
    assert made.type_name == "Q8_0"
    assert np.array_equal(made.data, gguf.quantize(to_floats(stored), GGUF.Q8_0))


@pytest.mark.parametrize("name", FLOAT_CODES)
def test_codes_that_are_floats_become_blocks_of_their_numbers(best: CpuLibrary, name: str) -> None:
    rows = ordinary(name, 40)
    made = in_q8_0(best, rows)
    assert made is not None
    assert made.type_name == "Q8_0"
    assert np.array_equal(made.data, gguf.quantize(dequantize(rows.data.reshape(-1), name).reshape(40, -1), GGUF.Q8_0))
    with pytest.raises(AssertionError, match="in_q8_0"):
        quantize(best, [rows], in_8_bits=True)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_numbers_without_a_scale_are_not_quantized(best: CpuLibrary, bad: float) -> None:
    values = np.ones((4, 64), np.float32)
    values[2, 40] = bad
    assert in_q8_0(best, BlockRows("F32", values.view(np.uint8))) is None
    assert in_q8_0(best, BlockRows("F32", np.ones((4, 48), np.float32).view(np.uint8))) is None


def test_the_variant_avx2_has_the_instruction_of_avx_vnni() -> None:
    """By the disassembler, because a CPU with AVX-512 need not have it in this encoding."""
    said = find_compiler().version
    is_known = "clang" not in said and int(re.findall(r"(\d+)\.\d+\.\d+", said)[0]) >= 12
    if shutil.which("objdump") is None or not is_known or "avx2" not in runnable_variants():
        pytest.skip("no objdump, no gcc that knows AVX_VNNI, or no variant avx2")
    command = ["objdump", "-d", find_library("avx2").path]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"\{vex\} vpdpbusd %ymm", listing)
    assert not re.search(r"%zmm|\bvpdpbusd .*%[xyz]mm(1[6-9]|2\d|3[01])", listing), "an instruction of AVX-512"
