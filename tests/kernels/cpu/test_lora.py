"""Adapters in a packed product: near the exact sum, each row's bits its own, rows without one as if there were none.

In every variant that this CPU runs."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kernels.arrays import Floats
from kernels.cpu.build import runnable_variants
from kernels.cpu.gemm import PackedMatrix, SecondForm, pack_second
from kernels.cpu.library import CpuLibrary, load_cpu_library
from kernels.cpu.lora import CpuAdapter, LoraRows, multiply_adapted
from kernels.cpu.quantized import quantize
from kernels.elements import BFLOAT16, FLOAT32, Dtype, Numbers, rounded, to_floats
from kernels.low_rank import LowRank, ProductShape
from tests.kernels.cpu.test_quantized import dense, ordinary

DTYPES = [FLOAT32, BFLOAT16]
#: Parts that strips of 16 columns divide, and parts that they do not; ranks below and above a register's lanes.
SHAPES = [ProductShape(576, (192, 64, 64)), ProductShape(75, (20, 10, 7)), ProductShape(64, (48, 48), is_gated=True)]
SHAPES += [ProductShape(33, (23, 23), is_gated=True), ProductShape(40, (100,))]


@pytest.fixture(scope="module", params=runnable_variants())
def variant(request: pytest.FixtureRequest) -> Iterator[CpuLibrary]:
    library = load_cpu_library(request.param)
    yield library
    library.stop_threads()


def numbers(*shape: int, dtype: Dtype = FLOAT32, seed: int = 0) -> Numbers:
    return rounded(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def parts_of(shape: ProductShape, dtype: Dtype, seed: int, ranks: Sequence[int]) -> list[LowRank | None]:
    """A part for each rank; 0 = the part is left as it is."""
    return [
        LowRank(
            numbers(rank, shape.depth, dtype=dtype, seed=seed + i), numbers(size, rank, dtype=dtype, seed=seed - i), 0.3
        )
        if rank
        else None
        for i, (size, rank) in enumerate(zip(shape.parts, ranks, strict=True))
    ]


def adapters_of(shape: ProductShape, dtype: Dtype) -> list[list[LowRank | None]]:
    num = len(shape.parts)
    ranks = [[8] * num, [1, 0, 21][:num], [64] * num, [0] * num, [3, 5, 16][:num]]
    return [parts_of(shape, dtype, 100 * seed, each) for seed, each in enumerate(ranks, 1)]


def low_rank(x: Numbers, parts: Sequence[LowRank | None], shape: ProductShape) -> tuple[Floats, Floats]:
    """What the adapter adds to rows x, in float64, and the sum of the magnitudes of what is added."""
    sums, sizes, wide = [], [], to_floats(x).astype(np.float64)
    for part, size in zip(parts, shape.parts, strict=True):
        if part is None:
            sums.append(np.zeros((len(x), size)))
            sizes.append(np.zeros((len(x), size)))
            continue
        a, b = (to_floats(each).astype(np.float64) for each in part[:2])
        sums.append(wide @ a.T * part.scale @ b.T)
        sizes.append(np.abs(wide) @ np.abs(a).T * part.scale @ np.abs(b).T)
    return np.concatenate(sums, 1), np.concatenate(sizes, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if not shape.is_gated], ids=str)
def test_equals_the_exact_sum(variant: CpuLibrary, dtype: Dtype, shape: ProductShape) -> None:
    weight, bias = numbers(sum(shape.parts), shape.depth, dtype=dtype), numbers(sum(shape.parts), seed=1)
    matrix = PackedMatrix(variant, weight, bias, out_dtype=FLOAT32)
    given = adapters_of(shape, dtype)
    packed = [CpuAdapter([shape, shape], [[None] * len(shape.parts), parts], dtype) for parts in given]
    width = max(one.width for one in packed)
    x = numbers(23, shape.depth, dtype=dtype, seed=2)
    which = np.arange(len(x)) % (len(given) + 1)  # the last has none
    addresses = np.array([*(one.address for one in packed), 0], np.int64)
    got = multiply_adapted(variant, matrix, x, LoraRows(addresses[which], width), 1)
    assert np.array_equal(multiply_adapted(variant, matrix, x, LoraRows(addresses[which], width), 0), matrix(x))
    wide = to_floats(x).astype(np.float64)
    exact, size = wide @ to_floats(weight).T.astype(np.float64) + bias, np.abs(wide) @ np.abs(to_floats(weight)).T
    for index, parts in enumerate(given):
        rows = which == index
        added, added_size = low_rank(x[rows], parts, shape)
        exact[rows] += added
        size[rows] += added_size
    assert (np.abs(got - exact) <= (size + np.abs(bias)) * (shape.depth + 70) * 2.0**-24).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [*SHAPES, ProductShape(2048, (130,))], ids=str)  # of the last, rows are a page apart
def test_a_row_has_the_same_bits_among_any_others(variant: CpuLibrary, dtype: Dtype, shape: ProductShape) -> None:
    """Alone, beside rows of its own adapter and of others; on one to three threads."""
    weight = numbers(sum(shape.parts), shape.depth, dtype=dtype)
    matrix = PackedMatrix(variant, weight, gate="silu" if shape.is_gated else None)
    packed = [CpuAdapter([shape], [parts], dtype) for parts in adapters_of(shape, dtype)]
    addresses = np.array([0, *(one.address for one in packed)], np.int64)
    width = max(one.width for one in packed)
    x = numbers(400, shape.depth, dtype=dtype, seed=3)
    which = np.random.default_rng(4).integers(0, len(addresses), len(x))
    which[200:300] = 1  # and a long run of one

    def run(rows: slice) -> Numbers:
        return multiply_adapted(variant, matrix, x[rows], LoraRows(addresses[which[rows]], width), 0)

    variant.start_threads(1)
    whole = run(slice(None))
    base = matrix(x)
    assert whole[which == 0].tobytes() == base[which == 0].tobytes()
    assert not np.array_equal(whole[which == 1], base[which == 1])
    for num_threads in (1, 2, 3):
        variant.start_threads(num_threads)
        for begin, end in [(0, 400), (0, 1), (7, 8), (200, 300), (198, 203), (37, 71), (399, 400), (100, 293)]:
            assert run(slice(begin, end)).tobytes() == whole[begin:end].tobytes(), (begin, end)


def test_a_product_of_few_rows_as_stored_has_the_same_sums(variant: CpuLibrary) -> None:
    shape, rows = ProductShape(64, (48, 48), is_gated=True), [ordinary("Q4_0", 96, 64)]
    stored = quantize(variant, rows, is_gated=True)
    assert stored is not None
    parts = CpuAdapter([shape], [parts_of(shape, BFLOAT16, 9, [8, 4])], BFLOAT16)
    whole = PackedMatrix(variant, dense(rows), gate="silu", is_kept=True)
    both = PackedMatrix(variant, stored, gate="silu", second=SecondForm(pack_second(variant, stored)))
    for count in (1, 4, 5):
        x, lora = numbers(count, 64, dtype=BFLOAT16), LoraRows(np.full(count, parts.address), parts.width)
        assert (
            multiply_adapted(variant, both, x, lora, 0).tobytes()
            == multiply_adapted(variant, whole, x, lora, 0).tobytes()
        )


def test_a_gate_has_the_adapters_sums(variant: CpuLibrary) -> None:
    """In float32 the gated product is that of merged weights, up to the rounding of the weights."""
    shape = ProductShape(64, (48, 48), is_gated=True)
    weight = numbers(96, 64)
    parts = parts_of(shape, FLOAT32, 9, [8, 4])
    merged = weight.astype(np.float64)
    for part, rows in zip(parts, (slice(0, 48), slice(48, 96)), strict=True):
        assert part is not None
        merged[rows] += part.scale * part.b.astype(np.float64) @ part.a.astype(np.float64)
    x = numbers(5, 64, seed=1)
    adapter = CpuAdapter([shape], [parts], FLOAT32)
    rows = LoraRows(np.full(5, adapter.address), adapter.width)
    got = multiply_adapted(variant, PackedMatrix(variant, weight, gate="silu"), x, rows, 0)
    sums = x.astype(np.float64) @ merged.T
    expected = sums[:, :48] / (1 + np.exp(-sums[:, :48])) * sums[:, 48:]
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()
