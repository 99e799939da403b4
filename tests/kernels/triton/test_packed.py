"""Products with packed weights: near those with the dequantized numbers, for any type, shape and number of rows."""

import math
from collections.abc import Sequence

import pytest
import torch

from kernels.torch.packed_rows import PackedRows, unpack
from kernels.triton import packed_linear, packed_product
from kernels.triton.packed_linear import MOST_FLOAT_ROWS, MOST_ROWS, PackedLinear
from kernels.triton.packed_linear import unpack as device_unpack
from tests.kernels.torch.test_packed_rows import HALVES, narrow_blocks, packed_blocks, random_blocks
from tests.triton_device import ANYWHERE, DEVICE, GPU_ONLY, ON_GPU

pytestmark = ANYWHERE

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Largest relative error of a number rounded to the type; the interpreter cuts bfloat16 off.
ROUNDING = {torch.float32: 2**-22, torch.float16: 2**-10, torch.bfloat16: 2**-7}


NARROW = "Q5_0 in four bits"


def packed(type_name: str, rows: int = 70, depth: int = 512) -> PackedRows:
    if type_name == NARROW:
        return packed_blocks(narrow_blocks(rows, depth), "Q5_0", DEVICE)
    return packed_blocks(random_blocks(type_name, rows, depth), type_name, DEVICE)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)


def assert_product(
    got: torch.Tensor, x: torch.Tensor, parts: Sequence[PackedRows], bias: torch.Tensor | None = None
) -> None:
    """The error is at most that of rounding each weight, and the result twice, to x's type."""
    weight = torch.cat([unpack(part) for part in parts]).double()
    expected = x.double() @ weight.T
    sizes = x.double().abs() @ weight.abs().T
    if bias is not None:
        expected += bias
        sizes += bias.abs()
    assert got.shape == expected.shape
    assert bool(((got.double() - expected).abs() <= 3 * ROUNDING[x.dtype] * sizes).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("type_name", [*HALVES, NARROW])
def test_unpacked_rows_are_those_of_the_reference(type_name: str, dtype: torch.dtype) -> None:
    """Bit for bit, but that the interpreter cuts bfloat16 off."""
    part = packed(type_name)
    got, expected = device_unpack(part, dtype), unpack(part)
    if ON_GPU or dtype != torch.bfloat16:
        assert torch.equal(got, expected.to(dtype))
    torch.testing.assert_close(got.float(), expected, rtol=ROUNDING[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("type_name", [*HALVES, NARROW])
def test_few_rows(type_name: str, dtype: torch.dtype) -> None:
    part, x = packed(type_name), random(3, 512, dtype=dtype)
    assert_product(PackedLinear([part], None, dtype, dtype, name="stored")(x), x, [part])


@pytest.mark.parametrize(
    ("dtype", "count"),
    [
        *((torch.float32, count) for count in (1, MOST_FLOAT_ROWS, MOST_FLOAT_ROWS + 1)),
        *((torch.float16, count) for count in (17, 33, MOST_ROWS, MOST_ROWS + 1)),
    ],
)
@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K"])
def test_any_number_of_rows(type_name: str, dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beyond the most by pieces, of which there are several."""
    monkeypatch.setattr(packed_linear, "PIECE", 64 * 512)
    part, x, bias = packed(type_name), random(count, 512, dtype=dtype), random(70, dtype=dtype)
    for out_dtype in (torch.float32, dtype):
        got = PackedLinear([part], bias, dtype, out_dtype, name="stored")(x)
        assert got.dtype == out_dtype
        assert_product(got, x, [part], bias)
    assert_product(PackedLinear([part], None, dtype, dtype, name="stored")(x), x, [part])


def test_a_tile_has_not_always_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_product, "_MOST_TILE_ROWS", 16)
    part, x = packed("Q4_0"), random(35, 512, dtype=torch.float16)
    assert_product(PackedLinear([part], None, x.dtype, x.dtype, name="stored")(x), x, [part])


def test_no_rows() -> None:
    product = PackedLinear([packed("Q8_0")], None, torch.float32, torch.float32, name="stored")
    assert product(random(0, 512)).shape == (0, 70)


@pytest.mark.parametrize(("type_name", "depth"), [("Q8_0", 32), ("Q4_0", 64), ("Q5_1", 96), ("Q4_0", 576)])
@pytest.mark.parametrize("count", [2, MOST_FLOAT_ROWS + 1])
def test_depths_that_are_no_whole_tiles(type_name: str, depth: int, count: int) -> None:
    part, x = packed(type_name, 5, depth), random(count, depth)
    assert_product(PackedLinear([part], None, torch.float32, torch.float32, name="stored")(x), x, [part])


@pytest.mark.parametrize("count", [3, MOST_FLOAT_ROWS + 1])
def test_parts_of_several_types_with_a_bias(count: int) -> None:
    parts = [packed("Q4_K", 70), packed("Q6_K", 10), packed("Q8_0", 33)]
    x, bias = random(count, 512), random(113)
    assert_product(PackedLinear(parts, bias, torch.float32, torch.float32, name="stored")(x), x, parts, bias)


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0"])
def test_a_depth_in_parts(type_name: str) -> None:
    """Few columns are cut along their depth: here into parts of which the last is shorter."""
    part, bias = packed(type_name, 70, 4736), random(70)
    width = part.codes.shape[1]
    tile_bytes = packed_product.bytes_of_tile(part, 16)
    split_tiles, parts = packed_product.split_product(70, width, 16, tile_bytes)
    assert parts > 1
    assert width % (split_tiles * tile_bytes)
    x = random(3, 4736)
    product = PackedLinear([part], bias, torch.float32, torch.float32, name="stored")
    assert_product(product(x), x, [part], bias)
    assert_product(product(x[:1]), x[:1], [part], bias)


@pytest.mark.parametrize("num_columns", [1, 70, 4096, 6144, 28_672, 128_256])
@pytest.mark.parametrize("width", [32, 288, 2048, 4096, 14_336])
@pytest.mark.parametrize(("tile_rows", "most"), [(16, 528), (32, 528), (64, 264), (128, 264)])
def test_the_parts_of_a_depth_are_the_whole(num_columns: int, width: int, tile_rows: int, most: int) -> None:
    for tile_bytes in (64, 128):
        split_tiles, parts = packed_product.split_product(num_columns, width, tile_rows, tile_bytes)
        assert parts == math.ceil(width / (split_tiles * tile_bytes))
        assert parts == 1 or parts * math.ceil(num_columns / packed_product.TILE_COLUMNS) <= most


def test_a_row_has_the_same_bits_among_others() -> None:
    """As long as one tile has all rows."""
    product = PackedLinear([packed("Q4_K", 70, 2560)], None, torch.float32, torch.float32, name="stored")
    x = random(16, 2560)
    assert torch.equal(product(x)[5:6], product(x[5:6]))


@pytest.mark.parametrize(
    "type_name", [pytest.param(name, marks=GPU_ONLY) for name in ("Q8_0", "Q4_0", "Q4_K", "Q6_K", NARROW)]
)
@pytest.mark.parametrize("count", [1, 8, 64, 512])
def test_shapes_of_llama_3_8b(type_name: str, count: int) -> None:
    """In bfloat16, and the same inside a CUDA graph."""
    part, x = packed(type_name, 4096, 14_336), random(count, 14_336, dtype=torch.bfloat16)
    product = PackedLinear([part], None, torch.bfloat16, torch.bfloat16, name="stored")
    expected = product(x)
    assert_product(expected, x, [part])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = product(x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, expected)
