"""Products of 8-bit floats: what is quantized, each number's definition, and the bits of a row in every tile."""

import math
import zlib
from fractions import Fraction
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from core.models.operations.fp8_matrix import fp8_matrix
from core.models.operations.stored_matrix import StoredMatrix, StoredPart
from kernels.dequantize import E4M3
from kernels.elements import BFLOAT16
from kernels.torch.tensors import to_array
from kernels.triton import self_test
from kernels.triton.fp8.fp8_linear import Fp8Linear
from kernels.triton.fp8.fp8_product import BLOCK, TILES, Fp8Rows, fp8_product, fp8_tile, quantized
from kernels.triton.ordered_product import ProductTile
from kernels.triton.packed_linear import PackedLinear
from tests.kernels.triton.tensor_core import ADA_FP8, BLACKWELL_FP8, HOPPER_FP8, Core, multiply_add, product
from tests.triton_device import ANYWHERE, DEVICE, ON_GPU
from tools.lab.bench.gpu.report import EMULATED_FP8

pytestmark = ANYWHERE


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- what is quantized -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "depth"), [(1, 128), (3, 200), (35, 64)])
def test_blocks_of_a_row_are_quantized_by_themselves(dtype: torch.dtype, rows: int, depth: int) -> None:
    x = (random(rows, depth) * torch.exp2(torch.arange(rows)[:, None] * 3.0 - 9)).to(dtype)
    x[rows - 1, :64] = 0.0
    found = quantized(x.to(DEVICE))
    width = math.ceil(depth / BLOCK) * BLOCK
    blocks = torch.nn.functional.pad(x.float(), (0, width - depth)).view(rows, -1, BLOCK)
    scales = blocks.abs().amax(2) / 448
    codes = (blocks / scales.where(scales > 0, 1.0)[:, :, None]).to(torch.float8_e4m3fn)
    assert torch.equal(found.scales.cpu(), scales.T)
    assert torch.equal(found.codes.cpu(), codes.view(torch.uint8).view(rows, width))
    numbers = found.numbers.cpu()
    assert numbers.shape == x.shape
    torch.testing.assert_close(numbers, x.float(), rtol=2.0**-4, atol=float(scales.max()) * 2.0**-10)


def test_numbers_that_are_none_stay_in_their_block() -> None:
    x = random(2, 256)
    x[1, 130] = math.nan
    found = quantized(x.to(DEVICE)).numbers.cpu()
    assert found[0].isfinite().all()
    assert found[1, :128].isfinite().all()
    assert found[1, 130].isnan()
    assert quantized(x[:0].to(DEVICE)).codes.shape == (0, 256)


# --- products --------------------------------------------------------------------------------------------------------


def defined(x: Fp8Rows, weight: Fp8Rows, core: Core = HOPPER_FP8) -> NDArray[np.float32]:
    """The product [T, out], as kernels/triton/fp8/fp8_product.py defines it."""
    left, right = weight.codes.cpu().numpy(), x.codes.cpu().numpy().T
    sums = np.zeros((len(left), right.shape[1]), np.float32)
    for block, (scales, x_scales) in enumerate(zip(weight.scales.cpu().numpy(), x.scales.cpu().numpy(), strict=True)):
        k = slice(block * BLOCK, (block + 1) * BLOCK)
        part = product(left[:, k], right[k], np.zeros_like(sums), core)
        sums = multiply_add(part, scales[:, None] * x_scales[None, :], sums)
    return sums.T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("depth", "columns"), [(72, 70), (384, 33)])
def test_a_row_has_the_same_bits_in_every_tile(dtype: torch.dtype, depth: int, columns: int) -> None:
    x, weight = random(37, depth).to(DEVICE, dtype), quantized(random(columns, depth, seed=1).to(DEVICE))
    bias, out = random(columns, seed=2).to(DEVICE), torch.empty(37, columns, device=DEVICE)
    first, *others = (fp8_product(x, weight, bias, out.clone(), tile) for tile in TILES.values())
    assert all(torch.equal(first, other) for other in others)
    assert torch.equal(fp8_product(x[5:6], weight, bias, out[:1].clone()), first[5:6])
    plain = fp8_product(x, weight, None, out.clone())
    assert torch.equal(plain + bias, first)
    if not ON_GPU:  # on a GPU the core may be another
        assert np.array_equal(plain.numpy(), defined(quantized(x), weight))
    exact = quantized(x).numbers.double() @ weight.numbers.double().T
    errors = (plain.double() - exact).abs().max() / exact.abs().max()
    assert 0 < errors < 2.0**-10, "13 bits behind the point are left of a part"
    for out_dtype in (dtype, torch.float32):
        layer = Fp8Linear(weight, None, dtype, out_dtype)
        assert torch.equal(layer(x), plain.to(out_dtype))
        assert layer(x[:0]).shape == (0, columns)
    assert torch.equal(Fp8Linear(weight, None, dtype, torch.float32).in_own_dtype()(x), plain.to(dtype))


def test_the_same_weights_for_inputs_that_are_not_quantized() -> None:
    for depth, kind in ((192, PackedLinear), (72, object)):
        weight, x = quantized(random(20, depth).to(DEVICE)), random(3, depth, seed=1).to(DEVICE)
        whole = Fp8Linear(weight, None, torch.float32, torch.float32).with_whole_inputs()
        assert isinstance(whole, kind)
        torch.testing.assert_close(whole(x), x @ weight.numbers.T, rtol=1e-5, atol=1e-4)


def test_more_rows_have_larger_tiles() -> None:
    assert [fp8_tile(count).rows for count in (1, 16, 17, 33, 65, 8192)] == [16, 16, 32, 64, 128, 128]
    assert all(tile.columns >= 64 for tile in TILES.values()), "Hopper's wgmma and mma.sync have not the same bits"
    assert all(tile.depth == BLOCK for tile in TILES.values())


@pytest.mark.skipif(ON_GPU, reason="with a product of its own")
def test_the_self_test_sees_tiles_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    assert self_test.fp8_products_are_ordered(DEVICE)

    def by_tile(x: torch.Tensor, weight: Fp8Rows, bias: Any, out: torch.Tensor, tile: ProductTile) -> torch.Tensor:
        return fp8_product(x, weight, bias, out, tile) * (2 if tile.rows > 16 else 1)

    monkeypatch.setattr(self_test, "fp8_product", by_tile)
    self_test.fp8_products_are_ordered.cache_clear()
    try:
        assert not self_test.fp8_products_are_ordered(DEVICE)
    finally:
        self_test.fp8_products_are_ordered.cache_clear()


@pytest.mark.skipif(ON_GPU, reason="with a core of its own")
def test_the_self_tests_numbers_depend_on_the_core() -> None:
    """So a device whose tiles have several kinds of instructions is seen. The report of a GPU names them."""
    x, weight = (quantized(numbers) for numbers in self_test.factors())
    digests = [
        zlib.crc32(np.ascontiguousarray(defined(x, weight, core)).tobytes())
        for core in (HOPPER_FP8, ADA_FP8, BLACKWELL_FP8)
    ]
    assert digests == list(EMULATED_FP8.values())
    assert len(set(digests)) == 3
    assert set(self_test.fp8_tile_digests(DEVICE)) == {digests[0]}


# --- weights ---------------------------------------------------------------------------------------------------------


def of_file(codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> StoredPart:
    """A matrix as FP8 of a file, with a scale for each 64."""
    blocks = np.concatenate((scales[:, :, None].view(np.uint8), codes.reshape(*scales.shape, 64)), 2)
    return StoredPart("FP8", np.ascontiguousarray(blocks).reshape(len(codes), -1), codes.shape[1])


def test_what_is_fp8_in_a_file_stays_so() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 0x7F, (5, 192), np.uint8)
    scales = rng.random((5, 3), np.float32)
    scales[:, 1] = scales[:, 0]
    stored = of_file(codes, scales)
    found = fp8_matrix(StoredMatrix([stored]), DEVICE)
    assert found is not None
    assert np.array_equal(found.codes.cpu().numpy()[:, :192], codes)
    assert not found.codes[:, 192:].any()
    assert np.array_equal(found.scales.cpu().numpy(), scales[:, ::2].T)
    assert np.array_equal(found.numbers.cpu().numpy(), StoredMatrix([stored]).dense(np.dtype(np.float32)))


def test_all_else_is_quantized() -> None:
    """Also FP8 whose scales are those of fewer neighbours, as part of a matrix with others."""
    rng = np.random.default_rng(1)
    numbers = rng.standard_normal((4, 192), np.float32)
    halves = StoredMatrix.of(to_array(torch.from_numpy(numbers).bfloat16())).parts[0]
    blocks = gguf.quantize(numbers, gguf.GGMLQuantizationType["Q8_0"])
    parts = [
        of_file(rng.integers(0, 0x7F, (3, 192), np.uint8), rng.random((3, 3), np.float32)),
        halves,
        StoredPart("Q8_0", blocks, 192),
    ]
    assert halves.data.view(BFLOAT16).shape == (4, 192)
    found = fp8_matrix(StoredMatrix(parts), DEVICE)
    assert found is not None
    expected = quantized(torch.from_numpy(StoredMatrix(parts).dense(np.dtype(np.float32))).to(DEVICE))
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scales, expected.scales)


def test_a_matrix_of_numbers_that_are_none_is_left() -> None:
    numbers = np.ones((2, 64), np.float32)
    numbers[1, 3] = np.inf
    assert fp8_matrix(StoredMatrix.of(numbers), DEVICE) is None


# --- the emulated tensor core: the published description -------------------------------------------------------------


def exponent(number: Fraction, least: int) -> int:
    power = least
    while abs(number) >= Fraction(2) ** (power + 1):
        power += 1
    return power


def described(a: NDArray[np.uint8], b: NDArray[np.uint8], core: Core) -> Fraction:
    """The chain of sums of exact products, in rational numbers."""
    values = [[Fraction(float(E4M3[code])) for code in each] for each in (a, b)]
    total = Fraction(0)
    for first in range(0, len(a), core.group):
        pairs = list(zip(*(each[first : first + core.group] for each in values), strict=True))
        most = max([exponent(x, -6) + exponent(y, -6) for x, y in pairs if x * y] + [exponent(total, -100)])
        unit = Fraction(2) ** (most - core.fraction)
        total = unit * sum(math.trunc(each / unit) for each in (*(x * y for x, y in pairs), total))
        unit = Fraction(2) ** (exponent(total, -100) - core.kept)
        total = unit * math.trunc(total / unit)
    return total


@pytest.mark.parametrize("core", [HOPPER_FP8, ADA_FP8, BLACKWELL_FP8])
def test_a_tensor_core_is_as_described(core: Core) -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        a, b = (rng.integers(0, 0x7F, 64, np.uint8) | rng.integers(0, 2, 64, np.uint8) << np.uint8(7) for _ in "ab")
        a[rng.integers(0, 64, 20)] &= np.uint8(0x87)  # small ones
        found = product(a[None], b[:, None], np.zeros((1, 1), np.float32), core)
        assert Fraction(float(found[0, 0])) == described(a, b, core)


@pytest.mark.parametrize(
    ("core", "numbers", "expected"),
    [
        (HOPPER_FP8, {0: 1.0, 31: 2.0**-13, 3: -1.0}, 2.0**-13),
        (HOPPER_FP8, {0: 1.0, 31: 2.0**-14, 3: -1.0}, 0.0),  # cut
        (HOPPER_FP8, {0: 1.0, 32: 2.0**-14, 33: -1.0}, 0.0),  # the next sum cuts it too
        (HOPPER_FP8, {0: 1.0, 1: 1.0, 31: 2.0**-13}, 2.0),  # of the sum 13 bits are kept
        (ADA_FP8, {0: 1.0, 16: 2.0**-14, 3: -1.0}, 2.0**-14),  # of the next sum
        (BLACKWELL_FP8, {0: 1.0, 31: 2.0**-18, 3: -1.0}, 2.0**-18),
    ],
)
def test_a_tensor_core_cuts(core: Core, numbers: dict[int, float], expected: float) -> None:
    def coded(values: list[float]) -> NDArray[np.uint8]:
        found: NDArray[np.uint8] = torch.tensor(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return found

    given = [numbers.get(k, 0.0) for k in range(64)]
    factor = [2.0**-9 if abs(number) < 2.0**-9 else 1.0 for number in given]
    a, b = coded([number / small for number, small in zip(given, factor, strict=True)]), coded(factor)
    assert float(product(a[None], b[:, None], np.zeros((1, 1), np.float32), core)[0, 0]) == expected
