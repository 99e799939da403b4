"""The packed matrix product: near the exact one, and each row's bits its own - in every variant that this CPU runs."""

import itertools

import numpy as np
import pytest
import torch

from kernels.cpu.build import runnable_variants
from kernels.cpu.library import load_cpu_library
from kernels.cpu.packed_weights import COMPACT, WHOLE
from tests.kernels.cancelling import cancelling_product
from tests.kernels.on_tensors import CpuEmbedding, PackedMatrix

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(960, 576), (100, 75), (33, 64), (1, 1), (320, 2)]  # [out, in]; whole panels or not, odd depths


@pytest.fixture(scope="module", params=runnable_variants())
def variant(request):
    library = load_cpu_library(request.param)
    yield library
    library.stop_threads()


def numbers(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(matrix, dtype):
    """The packed numbers, seen as this dtype."""
    return torch.from_numpy(matrix.packed).view(dtype)


def assert_close(got, x, weight, bias=None):
    """Within the rounding errors of a float32 sum, and of the result's own dtype."""
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    error = x.double().abs() @ weight.double().abs().T * (x.shape[1] + 2) * 2**-24
    rounding = exact.abs() * (2**-8 if got.dtype == torch.bfloat16 else 2**-24)
    assert bool(((got.double() - exact).abs() <= error + rounding).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_exact_product(variant, dtype, shape):
    weight, bias = numbers(*shape, dtype=dtype), numbers(shape[0], seed=2)
    for num_rows in (0, 1, 2, 5, 13, 31):
        x = numbers(num_rows, shape[1], dtype=dtype, seed=1)
        for out_dtype in DTYPES:
            got = PackedMatrix(variant, weight, out_dtype=out_dtype)(x)
            assert got.dtype == out_dtype
            assert got.shape == (num_rows, shape[0])
            assert_close(got, x, weight)
            assert_close(PackedMatrix(variant, weight, bias, out_dtype=out_dtype)(x), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(352, 576), (100, 75), (96, 1536)], ids=str)
def test_a_row_has_the_same_bits_among_any_others(variant, dtype, shape):
    """All numbers of rows up to 64 and some more, at both ends of a batch, on one to three threads."""
    row, weight = cancelling_product(*shape, dtype)
    x = numbers(700, shape[1], dtype=dtype)
    x[::3] = row  # rows whose result shows every change in the order of summation
    matrix = PackedMatrix(variant, weight, out_dtype=torch.float32)
    variant.start_threads(1)
    whole = matrix(x)
    for num_threads in (1, 2, 3):
        variant.start_threads(num_threads)
        assert torch.equal(matrix(x), whole)
        for count in (*range(1, 65), 127, 128, 129, 200, 511)[:: (1, 4, 7)[num_threads - 1]]:
            assert torch.equal(matrix(x[:count]), whole[:count]), count
            assert torch.equal(matrix(x[700 - count :]), whole[700 - count :]), count
    row_result = matrix(row)
    assert torch.equal(whole[::3], row_result.expand(len(whole[::3]), -1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_comparison_would_see_another_order(variant, dtype):
    """The same sum in two halves."""
    row, weight = cancelling_product(64, 576, dtype)

    def product(part):
        return PackedMatrix(variant, weight[:, part], out_dtype=torch.float32)(row[:, part])

    assert not torch.equal(product(slice(0, 288)) + product(slice(288, 576)), product(slice(0, 576)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bias_is_added_before_the_one_rounding(variant, dtype):
    weight, bias, x = numbers(70, 48, dtype=dtype), numbers(70, seed=1), numbers(5, 48, dtype=dtype, seed=2)
    sums = PackedMatrix(variant, weight, out_dtype=torch.float32)(x)
    for out_dtype in DTYPES:
        got = PackedMatrix(variant, weight, bias, out_dtype=out_dtype)(x)
        assert torch.equal(got, (sums + bias).to(out_dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reads_its_rows_and_nothing_beside_them(variant, dtype):
    """Rows of a wider table, of odd length, with NaN in the rest of it."""
    table = torch.full((20, 90), torch.nan, dtype=dtype)
    x, weight = numbers(20, 75, dtype=dtype), numbers(40, 75, dtype=dtype, seed=1)
    table[:, :75] = x
    matrix = PackedMatrix(variant, weight)
    assert torch.equal(matrix(table[:, :75]), matrix(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("depth", [2048, 8192])
def test_rows_a_page_apart_have_the_bits_of_others(variant, depth, dtype):
    """Rows that are copied for the caches' sake, or not: as a block, with many others, and as parts of wider rows."""
    row, weight = cancelling_product(150, depth, dtype)
    x = numbers(130, depth, dtype=dtype)
    x[::3] = row
    table = torch.full((130, depth + 40), torch.nan, dtype=dtype)
    table[:, :depth] = x
    matrix = PackedMatrix(variant, weight, numbers(150, seed=2), out_dtype=torch.float32)
    variant.start_threads(1)
    whole = torch.cat([matrix(x[i : i + 5]) for i in range(0, 130, 5)])
    for num_threads in (1, 2):
        variant.start_threads(num_threads)
        for count in (9, 14, 60, 130):
            assert torch.equal(matrix(x[:count]), whole[:count])
            assert torch.equal(matrix(table[:count, :depth]), whole[:count])


@pytest.mark.parametrize("num_columns", [90_000, 90_007])
def test_results_that_caches_do_not_keep_have_the_bits_of_others(variant, num_columns):
    """They are written past the caches if their rows begin at lines: 36 MB here, and by fewer rows at a time."""
    weight, x = numbers(num_columns, 32, dtype=torch.bfloat16), numbers(100, 32, dtype=torch.bfloat16, seed=1)
    matrix = PackedMatrix(variant, weight, out_dtype=torch.float32)
    variant.start_threads(2)
    whole = matrix(x)
    assert torch.equal(whole, torch.cat([matrix(x[:50]), matrix(x[50:])]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_of_rows_a_page_apart_have_the_bits_of_others(variant, dtype):
    """Rows whose distance is a page, and whose rest must not be read."""
    row, weight = cancelling_product(150, 1010, dtype)
    table = torch.full((130, 2048), torch.nan, dtype=dtype)
    table[:, :1010] = numbers(130, 1010, dtype=dtype)
    table[::3, :1010] = row
    x = table[:, :1010].contiguous()
    matrix = PackedMatrix(variant, weight, numbers(150, seed=2), out_dtype=torch.float32)
    for num_threads in (1, 2):
        variant.start_threads(num_threads)
        for count in (9, 14, 130):
            assert torch.equal(matrix(table[:count, :1010]), matrix(x[:count]))


def test_results_round_as_torch_does(variant):
    """Results round to nearest, ties to even; too large values become infinite, and NaN stays NaN."""
    bits = torch.arange(0, 2**32, 2**32 // 4001 | 1, dtype=torch.int64).to(torch.int32)
    halfway = (torch.arange(-300, 300, dtype=torch.int32) << 16) | 0x8000
    x = torch.cat([bits, halfway, halfway - 1, halfway + 1]).view(torch.float32).unsqueeze(1)
    got = PackedMatrix(variant, torch.ones(1, 1), out_dtype=torch.bfloat16)(x)
    assert torch.equal(got.isnan(), x.isnan())
    assert torch.equal(got[~x.isnan()].view(torch.int16), (x + 0).bfloat16()[~x.isnan()].view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("source", [*DTYPES, torch.float16], ids=str)
def test_packs_from_any_dtype(variant, dtype, source):
    weight = numbers(100, 75).to(source)
    if source == torch.float16:  # every kind of number it has
        kinds = torch.tensor([0.0, -0.0, 2**-24, -(2**-14), 65504, torch.inf, -torch.inf, torch.nan], dtype=source)
        weight[0, :8] = kinds
    direct, converted = PackedMatrix(variant, weight, dtype=dtype), PackedMatrix(variant, weight.to(dtype))
    is_nan = packed(direct, dtype).isnan()
    assert torch.equal(is_nan, packed(converted, dtype).isnan())
    assert torch.equal(packed(direct, dtype)[~is_nan], packed(converted, dtype)[~is_nan])
    for strided in (weight.T.contiguous().T, torch.cat([weight, weight], 1)[:, :75]):
        assert np.array_equal(PackedMatrix(variant, strided, dtype=dtype).packed, direct.packed)


def test_vectors_of_eight_and_sixteen_give_the_same_bits():
    """An element's sum knows nothing of the lanes beside it. (dpbf16 rounds otherwise, SSE has no fused add.)"""
    variants = {name: load_cpu_library(name) for name in runnable_variants() if name in ("avx512", "avx2")}
    if len(variants) < 2:
        pytest.skip("this CPU has no AVX-512")
    for dtype in DTYPES:
        weight, x = numbers(100, 75, dtype=dtype), numbers(9, 75, dtype=dtype, seed=1)
        one, other = (PackedMatrix(library, weight, out_dtype=torch.float32)(x) for library in variants.values())
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 7, 33, 100, 256])
@pytest.mark.parametrize("function", ["silu", "gelu_pytorch_tanh"])
def test_a_gate_is_what_it_should_be(variant, function, width, dtype):
    """The matrix is chosen so that it passes gate and up through."""
    x = (numbers(9, 2 * width, seed=width) * 4).to(dtype)
    x[0, 0], x[1, 0], x[2, 0] = -300.0, 300.0, -9.0
    matrix = PackedMatrix(variant, torch.eye(2 * width, dtype=dtype), gate=function)
    gate, up = x.double().chunk(2, -1)
    silu = gate * gate.sigmoid()
    exact = (silu if function == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")) * up
    got = matrix(x)
    assert got.dtype == dtype
    assert got.shape == exact.shape
    assert torch.allclose(got.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 2e-6, atol=1e-6)
    x[3, 0] = torch.nan
    assert got.isfinite().all()
    assert matrix(x)[3, 0].isnan()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", ["silu", "gelu_pytorch_tanh"])
def test_a_gate_sees_rounded_sums_and_no_other_row(variant, function, dtype):
    """The bits of two products, of which the second hands through what the first has rounded; on any threads."""
    weight, x = numbers(2 * 70, 75, dtype=dtype), numbers(300, 75, dtype=dtype, seed=1)
    matrix = PackedMatrix(variant, weight, gate=function)
    whole = PackedMatrix(variant, torch.eye(2 * 70, dtype=dtype), gate=function)(PackedMatrix(variant, weight)(x))
    for num_threads in (1, 2, 3):
        variant.start_threads(num_threads)
        for count in (1, 2, 3, 13, 15, 40, 300):
            assert torch.equal(matrix(x[:count]), whole[:count]), count
            assert torch.equal(matrix(x[300 - count :]), whole[300 - count :]), count


def test_allocations_are_aligned_and_apart(c_library):
    sizes = [1, 64, 65, 1 << 20, 40 << 20]
    blocks = [c_library.memory.allocate(size) for size in sizes]
    assert [len(block) for block in blocks] == sizes
    assert all(block.ctypes.data % 64 == 0 for block in blocks)
    for value, block in enumerate(blocks, 1):
        block.fill(value)
    assert [int(block.min()) for block in blocks] == [int(block.max()) for block in blocks] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("shape", [(960, 576), (102, 76), (34, 63)], ids=str)
def test_what_memory_had_before_does_not_matter(variant, shape, monkeypatch):
    """Memory of earlier weights is packed into again."""
    found = []
    for content in (0, 0xA5):

        def allocate(num_bytes, _, content=content):
            memory = np.full(num_bytes + 64, content, np.uint8)
            return memory[-memory.ctypes.data % 64 :][:num_bytes]

        monkeypatch.setattr(variant.memory, "allocate", allocate)
        for dtype, options in itertools.product(DTYPES, ({}, {"gate": "silu"}, {"is_kept": True})):
            matrix = PackedMatrix(variant, numbers(*shape, dtype=dtype), **options)
            found.append(matrix(numbers(3, shape[1], dtype=dtype, seed=1)))
    half = len(found) // 2
    for before, after in zip(found[:half], found[half:], strict=True):
        assert torch.equal(before, after)


def compact(variant, weight, **options):
    """Weights in 12 bits; skips where the instruction set has nothing for them."""
    matrix = PackedMatrix(variant, weight, **options)
    if variant.variant == "portable":
        assert matrix.packing == WHOLE
        pytest.skip("compact weights are unpacked by AVX2 and AVX-512")
    assert matrix.packing == COMPACT
    return matrix


def all_patterns():
    """[1024, 512]: each panel has 2,048 of all numbers in an eighth of its pairs, 16 upper bytes else."""
    values = torch.randint(0, 256, (1024, 512), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    upper = torch.randint(0, 16, (1024, 512), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    bits = values | (0x38 + upper % 8 + upper // 8 * 0x80) << 8
    bits.view(32, 32, 8, 64)[:, :, 2] = torch.arange(2**16, dtype=torch.int32).view(32, 32, 64)
    return bits.to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("shape", [(960, 576), (33, 64), (1, 4), (320, 8), (576, 1536)], ids=str)
def test_compact_weights_give_the_bits_of_whole_ones(variant, shape):
    """The whole weights have two more columns of zeros, so that their depth is not a multiple of four."""
    weight = numbers(*shape, dtype=torch.bfloat16)
    weight.view(-1)[:: max(1021, shape[1] * 7)] = 1e-20  # its upper byte is in no table
    matrix = compact(variant, weight, out_dtype=torch.float32)
    whole = PackedMatrix(variant, torch.nn.functional.pad(weight, (0, 2)), out_dtype=torch.float32)
    assert not whole.packing
    for num_rows in (*range(1, 33), 100, 700):
        x = numbers(num_rows, shape[1], dtype=torch.bfloat16, seed=num_rows)
        assert torch.equal(matrix(x), whole(torch.nn.functional.pad(x, (0, 2)))), num_rows


def test_compact_weights_are_exact(variant):
    """Every number there is, seen through the rows of an embedding table and through a product."""
    weight = all_patterns()
    matrix = compact(variant, weight, out_dtype=torch.float32)
    found = CpuEmbedding(variant, matrix)(torch.arange(1024))
    is_nan = weight.isnan()
    assert torch.equal(found.isnan(), is_nan)
    assert torch.equal(found.view(torch.int32)[~is_nan], weight.float().view(torch.int32)[~is_nan])
    whole = PackedMatrix(variant, torch.nn.functional.pad(weight, (0, 2)), out_dtype=torch.float32)
    x = numbers(20, 512, dtype=torch.bfloat16)
    got, expected = matrix(x), whole(torch.nn.functional.pad(x, (0, 2)))
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got[~got.isnan()], expected[~expected.isnan()])


def test_weights_are_compact_where_that_is_smaller(variant):
    weight = numbers(320, 576, dtype=torch.bfloat16) * 0.05
    assert compact(variant, weight).packed.nbytes < 0.8 * weight.nbytes
    assert not PackedMatrix(variant, weight, is_kept=True).packing
    assert not PackedMatrix(variant, weight.float()).packing
    bits = torch.randint(-(2**15), 2**15, (320, 576), generator=torch.Generator().manual_seed(0), dtype=torch.int16)
    assert not PackedMatrix(variant, bits.view(torch.bfloat16)).packing


@pytest.mark.parametrize("function", ["silu", "gelu_pytorch_tanh"])
def test_compact_weights_with_a_gate(variant, function):
    weight, x = numbers(200, 64, dtype=torch.bfloat16), numbers(9, 64, dtype=torch.bfloat16, seed=1)
    got = compact(variant, weight, gate=function)(x)
    whole = PackedMatrix(variant, torch.nn.functional.pad(weight, (0, 2)), gate=function)
    assert torch.equal(got, whole(torch.nn.functional.pad(x, (0, 2))))
