"""Quantized weights: the bits of products with the dequantized matrix, from about as many bytes as the file has."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kernels.cpu.build import runnable_variants
from kernels.cpu.embedding import CpuEmbedding
from kernels.cpu.gemm import PackedMatrix, SecondForm, pack, pack_second
from kernels.cpu.library import CpuLibrary, load_cpu_library
from kernels.cpu.packed_weights import QUANTIZED
from kernels.cpu.quantized import BlockRows, bits_in_memory, quantize
from kernels.dequantize import BLOCK_SIZES, PLAIN_TYPES, dequantize
from kernels.elements import BFLOAT16, FLOAT32, Numbers, rounded, to_floats
from tests.kernels.block_scales import TYPES, WIDE_SCALES, num_scales, set_scales, without_nan
from tests.kernels.test_dequantize import random_blocks

DEPTH = 512
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 13, 15, 29, 300]


@pytest.fixture(scope="module", params=runnable_variants())
def variant(request: pytest.FixtureRequest) -> Iterator[CpuLibrary]:
    library = load_cpu_library(request.param)
    library.start_threads(2)
    yield library
    library.stop_threads()


def ordinary(name: str, rows: int, depth: int = DEPTH, seed: int = 0) -> BlockRows:
    """Random codes, and scales of both signs as a model has them."""
    rng = np.random.default_rng(seed)
    weights, num_bytes = BLOCK_SIZES[name]
    if name in PLAIN_TYPES:
        return BlockRows(
            name, rounded(rng.standard_normal((rows, depth), np.float32), PLAIN_TYPES[name]).view(np.uint8)
        )
    blocks = without_nan(rng.integers(0, 256, (rows, depth // weights, num_bytes), np.uint8), name)
    set_scales(blocks, name, rng.standard_normal((*blocks.shape[:2], num_scales(name))) * 0.003)
    return BlockRows(name, blocks.reshape(rows, -1))


def dense(parts: Sequence[BlockRows]) -> Numbers:
    """The numbers of all rows, in bfloat16."""
    with np.errstate(invalid="ignore"):  # an infinite scale times zero
        plain = [dequantize(part.data.reshape(-1), part.type_name).reshape(-1, part.depth) for part in parts]
    return np.concatenate([rounded(rows, BFLOAT16) for rows in plain])


def numbers(rows: int, depth: int = DEPTH, seed: int = 7) -> Numbers:
    return rounded(np.random.default_rng(seed).standard_normal((rows, depth), np.float32), BFLOAT16)


def assert_same_products(library: CpuLibrary, parts: Sequence[BlockRows], rows: Sequence[int] = ROWS) -> PackedMatrix:
    """Compare the quantized matrix's products with those of the dequantized one, bit for bit; NaN equals NaN."""
    stored = quantize(library, parts)
    assert stored is not None
    matrix = PackedMatrix(library, stored, out_dtype=FLOAT32)
    whole = PackedMatrix(library, dense(parts), out_dtype=FLOAT32, is_kept=True)
    for count in rows:
        x = numbers(count, parts[0].depth)
        found, expected = matrix(x).view(np.uint32), whole(x).view(np.uint32)
        is_nan = np.isnan(expected.view(np.float32))
        assert np.array_equal(found[~is_nan], expected[~is_nan]), count
        assert np.isnan(found.view(np.float32)[is_nan]).all(), count
    return matrix


@pytest.mark.parametrize("name", TYPES)
def test_products_have_the_bits_of_the_dequantized_matrix(variant: CpuLibrary, name: str) -> None:
    parts = [ordinary(name, 100)]
    matrix = assert_same_products(variant, parts)
    panels = 4 * 32  # columns, the missing ones of the last panel included
    assert matrix.packing == QUANTIZED
    assert matrix.packed.nbytes == panels * DEPTH * bits_in_memory(name) / 8 + 64
    if not name.startswith(("IQ1", "IQ2", "IQ3", "TQ1")):
        assert matrix.packed.nbytes <= 1.04 * panels * parts[0].data.shape[1] + 64


def test_products_of_few_rows_read_the_stored_form_if_there_are_two(variant: CpuLibrary) -> None:
    """The two forms have other numbers here, which tells them apart. The second one may come later."""
    part = ordinary("Q4_0", 100)
    stored, zeros = quantize(variant, [part]), np.zeros((100, DEPTH), np.float32).astype(BFLOAT16)
    assert stored is not None
    second = SecondForm()
    alone, both = PackedMatrix(variant, stored), PackedMatrix(variant, stored, second=second)
    for count in (1, 4, 5, 300):
        assert both(numbers(count)).tobytes() == alone(numbers(count)).tobytes() != bytes(count * 200)
    second.use(pack(variant, zeros))
    for count in (1, 2, 3, 4):
        assert both(numbers(count)).tobytes() == alone(numbers(count)).tobytes()
    for count in (5, 8, 300):
        assert not both(numbers(count)).any()


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("name", TYPES)
def test_a_second_form_is_that_of_the_dequantized_matrix(variant: CpuLibrary, name: str, is_kept: bool) -> None:
    """Its columns are gates and up, and a last panel lacks some. Signs of zeros may differ, and so what is compact."""
    part = ordinary(name, 108)
    stored = quantize(variant, [part], is_gated=True)
    assert stored is not None
    second, whole = pack_second(variant, stored, is_kept=is_kept), dense([part])
    expected = pack(variant, whole, is_gated=True, is_kept=is_kept)
    if whole.astype(np.float32).all():
        assert second[1:] == expected[1:]
        assert np.array_equal(second.packed, expected.packed)
    for count in (5, 40):
        found, wanted = (PackedMatrix(variant, one, gate="silu")(numbers(count)) for one in (second, expected))
        assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("depth", [32, 96, 288])
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4", "NVFP4"])
def test_any_number_of_blocks(variant: CpuLibrary, name: str, depth: int) -> None:
    depth = depth * 2 if name == "NVFP4" else depth
    assert_same_products(variant, [ordinary(name, 33, depth)], [1, 7, 40])


@pytest.mark.parametrize(
    "rows",
    [
        {"Q4_K": 128, "Q6_K": 64},  # as llama.cpp mixes the types of Q, K and V
        {"Q4_K": 100, "Q5_0": 60, "Q8_0": 40},  # and where panels mix them too
        {"Q5_K": 128, "F16": 32, "F32": 1, "BF16": 20},
        {"IQ4_XS": 96, "Q3_K": 32, "Q2_K": 40, "IQ3_S": 50},
        {"TQ1_0": 40, "TQ2_0": 56, "MXFP4": 33, "NVFP4": 63, "IQ1_M": 64, "IQ2_XS": 32},
    ],
    ids=str,
)
def test_merged_matrices_of_several_types(variant: CpuLibrary, rows: dict[str, int]) -> None:
    parts = [ordinary(name, count, seed=count) for name, count in rows.items()]
    matrix = assert_same_products(variant, parts, [1, 6, 9, 200])
    assert matrix.packed.nbytes < 0.75 * dense(parts).nbytes


@pytest.mark.parametrize("names", [["Q4_K", "Q4_K"], ["Q4_0", "Q8_0"]], ids=str)
def test_a_gate_and_a_bias(variant: CpuLibrary, names: list[str]) -> None:
    """Panels of a gate have columns of both halves; where these are of two types, the panels are whole ones."""
    parts = [ordinary(name, 80, seed=i) for i, name in enumerate(names)]
    bias = np.random.default_rng(3).standard_normal(160, np.float32)
    stored, gated = quantize(variant, parts), quantize(variant, parts, is_gated=True)
    assert stored is not None
    assert (gated is None) == (names[0] != names[1])
    for count in (1, 5, 8, 33):
        x = numbers(count)
        with_bias = PackedMatrix(variant, stored, bias)(x), PackedMatrix(variant, dense(parts), bias)(x)
        assert with_bias[0].tobytes() == with_bias[1].tobytes()
        if gated is not None:
            pair = [PackedMatrix(variant, weight, gate="silu")(x).tobytes() for weight in (gated, dense(parts))]
            assert pair[0] == pair[1]


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "IQ4_XS", "Q2_K"])
def test_a_row_has_the_same_bits_among_any_others(variant: CpuLibrary, name: str) -> None:
    stored, x = quantize(variant, [ordinary(name, 352)]), numbers(300)
    assert stored is not None
    matrix = PackedMatrix(variant, stored, out_dtype=FLOAT32)
    whole = matrix(x)
    for threads in (1, 2, 3):
        variant.start_threads(threads)
        for count in (1, 2, 5, 6, 7, 14, 33, 127, 129, 300):
            assert matrix(x[:count]).tobytes() == whole[:count].tobytes(), count
            assert matrix(x[300 - count :]).tobytes() == whole[300 - count :].tobytes(), count
    variant.start_threads(2)


HOSTILE = {"nan": np.nan, "infinite": np.inf, "zero": 0.0, "subnormal": 2**-24, "huge": -65504.0}


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_scales(variant: CpuLibrary, name: str, kind: str) -> None:
    """One block of one column; only its panel may need more bytes."""
    part = ordinary(name, 128)
    blocks = part.data.reshape(128, -1, BLOCK_SIZES[name][1])
    plain = assert_same_products(variant, [part], [1])
    set_scales(blocks[37:38, -1], name, HOSTILE[kind])
    matrix = assert_same_products(variant, [part], [1, 7, 30])
    assert matrix.packed.nbytes - plain.packed.nbytes in (0, 32 * (2 * DEPTH) - (plain.packed.nbytes - 64) // 4)
    if kind == "subnormal" or (kind == "zero" and name != "MXFP4"):  # its least scale is a subnormal float32
        assert matrix.packed.nbytes == plain.packed.nbytes


@pytest.mark.parametrize("name", TYPES)
def test_scales_of_all_magnitudes(variant: CpuLibrary, name: str) -> None:
    """Every weight that the fast arithmetic might round otherwise is in a whole panel."""
    weights, num_bytes = BLOCK_SIZES[name]
    rough = random_blocks(name, 32 * DEPTH // weights, seed=5).reshape(32, -1)
    assert rough.shape[1] == DEPTH // weights * num_bytes
    assert_same_products(variant, [BlockRows(name, rough), ordinary(name, 64)], [1, 8])


@pytest.mark.parametrize("name", WIDE_SCALES)
def test_many_scales_of_24_bits_need_no_whole_panel(variant: CpuLibrary, name: str) -> None:
    """Of some 30,000 products of a code and a scale in a panel, some are just below a power of two."""
    stored = quantize(variant, [ordinary(name, 64, 8192)])
    assert stored is not None
    assert not stored.has_whole_panels


@pytest.mark.parametrize("name", TYPES)
def test_rows_of_an_embedding(variant: CpuLibrary, name: str) -> None:
    part = ordinary(name, 70)
    stored, ids = quantize(variant, [part]), np.array([69, 0, 31, 32, 5], np.int64)
    assert stored is not None
    expected = to_floats(dense([part]))[ids] * np.float32(1.25)
    for table in (PackedMatrix(variant, stored), part):
        found = CpuEmbedding(variant, table, 1.25)(ids)
        assert np.array_equal(found, expected)


def test_what_is_not_quantized(variant: CpuLibrary) -> None:
    """A matrix of plain numbers, and one most of whose panels would be whole."""
    assert quantize(variant, [ordinary("F16", 40), ordinary("BF16", 3)]) is None
    broken = ordinary("Q8_0", 96)
    set_scales(broken.data.reshape(96, -1, 34)[:64], "Q8_0", np.nan)
    assert quantize(variant, [broken]) is None
    assert quantize(variant, [ordinary("Q8_0", 40), ordinary("BF16", 200)]) is None


def test_rows_that_are_no_blocks_are_refused(c_library: CpuLibrary) -> None:
    part = ordinary("Q4_K", 3)
    with pytest.raises(ValueError, match="rows of 287 bytes Q4_K"):
        quantize(c_library, [BlockRows("Q4_K", part.data[:, :-1])])
    with pytest.raises(ValueError, match="rows of 272 bytes Q8_0 are no rows of 512 numbers"):
        quantize(c_library, [part, ordinary("Q8_0", 2, 256)])
    with pytest.raises(KeyError, match="Q8_K"):
        quantize(c_library, [BlockRows("Q8_K", part.data)])
