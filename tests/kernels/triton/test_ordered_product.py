"""Ordered products: each row has the same bits in tiles of every shape, and those of a tensor core."""

import math
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from core import log
from core.models import device_model
from core.models.operations.triton_operations import GATES
from kernels.elements import FLOAT32
from kernels.triton import self_test
from kernels.triton.linear import DeviceLinear, GatedLinear, torch_product
from kernels.triton.log_softmax import log_softmax
from kernels.triton.ordered_product import (
    FEW,
    FEW_IN_LITTLE,
    FLOATS,
    TILES,
    TILES_IN_LITTLE,
    gated_product,
    ordered_product,
    product_tile,
)
from kernels.triton.packed_linear import MOST_FLOAT_ROWS, MOST_ROWS, PackedLinear, unpack
from kernels.triton.self_test import products_are_ordered
from tests.core.models.test_llama import random_weights, tiny_config
from tests.kernels.triton.tensor_core import AMPERE, HOPPER, Core, product
from tests.kernels.triton.test_packed import packed
from tests.triton_device import ANYWHERE, DEVICE, ON_GPU

pytestmark = ANYWHERE


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("depth", "columns"), [(72, 50), (256, 33)])
def test_a_row_has_the_same_bits_in_every_tile(dtype: torch.dtype, depth: int, columns: int) -> None:
    x, weight = random(37, depth).to(DEVICE, dtype), random(columns, depth, seed=1).to(DEVICE, dtype)
    tiles = FLOATS.values() if dtype == torch.float32 else (FEW, FEW_IN_LITTLE, *TILES_IN_LITTLE.values())
    bias, out = random(columns, seed=2).to(DEVICE), torch.empty(37, columns, device=DEVICE)
    first, *others = (ordered_product(x, weight, bias, out.clone(), tile) for tile in tiles)
    assert all(torch.equal(first, other) for other in others)
    assert torch.equal(ordered_product(x[5:6], weight, bias, out[:1].clone()), first[5:6])
    exact = x.double() @ weight.double().T + bias
    torch.testing.assert_close(first.double(), exact, rtol=1e-5, atol=1e-5 * math.sqrt(depth))
    for out_dtype in (dtype, torch.float32):
        assert torch.equal(
            DeviceLinear(weight, None, out_dtype)(x), ordered_product(x, weight, None, out).to(out_dtype)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", list(GATES))
def test_an_activation_in_the_products_end_changes_no_bit(function: str, dtype: torch.dtype) -> None:
    """Gate and up are rounded before it, as they are in memory."""
    x, weight, bias = random(19, 72).to(DEVICE, dtype), random(50, 72, seed=1), random(50, seed=2).to(DEVICE)
    weight = (weight * 3).to(DEVICE, dtype)
    tiles = FLOATS.values() if dtype == torch.float32 else (FEW, *TILES_IN_LITTLE.values())
    layer = GatedLinear(weight, bias, function)
    expected = GATES[function](layer.gate_and_up(x))
    assert torch.equal(layer(x), expected)
    for tile in tiles:
        assert torch.equal(gated_product(x, weight, layer.bias, function, tile), expected)
    assert torch.equal(layer(x[3:4]), expected[3:4])
    unbiased = GatedLinear(weight, None, function)
    assert torch.equal(unbiased(x[:2]), GATES[function](unbiased.gate_and_up(x[:2])))
    assert layer(x[:0]).shape == (0, 25)


def test_more_rows_have_larger_tiles() -> None:
    rows = (1, 16, 17, 33, 65, 256, 257, 8192)
    sizes = [product_tile(count, 4096, torch.bfloat16, room=True).rows for count in rows]
    assert sizes == [16, 16, 32, 64, 128, 128, 256, 256]
    assert product_tile(1, 1 << 17, torch.bfloat16, room=True).columns == 64
    assert {product_tile(count, 4096, torch.bfloat16, room=False) for count in rows} <= {
        FEW_IN_LITTLE,
        *TILES_IN_LITTLE.values(),
    }
    assert product_tile(17, 1, torch.float32, room=True) == product_tile(999, 1, torch.float32, room=False)
    assert list(TILES)[:-1] == [32, 64, 256]


@pytest.mark.parametrize(
    ("type_name", "dtype"), [("Q4_0", torch.float16), ("Q4_K", torch.bfloat16), ("Q8_0", torch.float32)]
)
def test_packed_weights_give_the_bits_of_dense_ones(type_name: str, dtype: torch.dtype) -> None:
    """For few rows, which are multiplied as weights are unpacked, and for many."""
    part = packed(type_name, 20, 512)
    most = MOST_FLOAT_ROWS if dtype == torch.float32 else MOST_ROWS
    x, dense = random(most + 1, 512).to(DEVICE, dtype), DeviceLinear(unpack(part, dtype))
    whole = PackedLinear([part], None, dtype, dtype, name="stored")
    expected = dense(x)
    for count in (1, 3, 40, most + 1):
        assert torch.equal(whole(x[:count]), expected[:count])


@pytest.mark.skipif(ON_GPU, reason="with a product of its own")
def test_a_device_whose_products_depend_on_tiles_gets_l0(monkeypatch: pytest.MonkeyPatch) -> None:
    assert products_are_ordered(DEVICE, torch.float32)
    assert products_are_ordered(DEVICE, torch.bfloat16)

    def by_tile(x: torch.Tensor, weight: torch.Tensor, bias: Any, out: torch.Tensor, tile: Any) -> torch.Tensor:
        return ordered_product(x, weight, bias, out, tile) + (tile.rows > 16)

    said: list[str] = []
    monkeypatch.setattr(self_test, "ordered_product", by_tile)
    products_are_ordered.cache_clear()
    monkeypatch.setattr(log, "say", said.append)
    config = tiny_config(num_hidden_layers=1, vocab_size=64)
    try:
        for numerics, expected, lines in (("L2", "L0", 1), ("L0", "L0", 1)):
            model = device_model.device_model(
                config, random_weights(config, FLOAT32), FLOAT32, DEVICE, numerics=numerics
            )
            assert (model.numerics, len(said)) == (expected, lines)
            assert model.operations._product is torch_product
    finally:
        products_are_ordered.cache_clear()
    assert "numerics level L0: this device's products depend" in said[0]


def test_log_probabilities_of_whole_rows() -> None:
    logits, divisors = random(3, 2500) * 9, torch.tensor([1.0, 0.5, 2.0])
    logits[1, :7] = -torch.inf
    got = log_softmax(logits.to(DEVICE), divisors.to(DEVICE)).cpu()
    torch.testing.assert_close(got, torch.log_softmax(logits / divisors[:, None], -1), rtol=1e-5, atol=1e-5)
    assert torch.equal(log_softmax(logits[1:2].to(DEVICE), divisors[1:2].to(DEVICE)).cpu(), got[1:2])
    assert log_softmax(logits[:0].to(DEVICE), divisors[:0].to(DEVICE)).shape == (0, 2500)


# --- the emulated tensor core: cases by hand from the published description ------------------------------------------


def of_bfloat16(*numbers: float) -> NDArray[np.uint16]:
    return (np.array(numbers, np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize(
    ("core", "numbers", "before", "expected"),
    [
        (HOPPER, {0: 1.0, 15: 2.0**-25}, 0.0, 1.0),  # 25 bits behind the point are kept, of which a float32 has 23
        (HOPPER, {0: 1.0, 15: 2.0**-25, 3: -1.0}, 0.0, 2.0**-25),
        (HOPPER, {0: 1.0, 15: 2.0**-26, 3: -1.0}, 0.0, 0.0),  # cut
        (HOPPER, {0: 1.0, 16: 2.0**-30, 3: -1.0}, 0.0, 2.0**-30),  # of the next sum
        (HOPPER, {0: 2.0**-23, 1: 2.0**-24}, 1.0, 1.0 + 2.0**-23),  # the end is cut, not rounded to the nearest
        (HOPPER, {0: 1.0, 15: 2.0**-26, 16: -1.0}, 0.0, 0.0),
        (AMPERE, {0: 1.0, 7: 2.0**-24, 3: -1.0}, 0.0, 2.0**-24),
        (AMPERE, {0: 1.0, 7: 2.0**-25, 3: -1.0}, 0.0, 0.0),
        (AMPERE, {0: 1.0, 8: 2.0**-40, 3: -1.0}, 0.0, 2.0**-40),
        (HOPPER, {0: -1.0, 1: 1.0}, -0.0, 0.0),  # never -0
        (HOPPER, {0: 2.0**-120, 1: 2.0**-126}, 0.0, 2.0**-120 + 2.0**-126),
    ],
)
def test_a_tensor_core_cuts(core: Core, numbers: dict[int, float], before: float, expected: float) -> None:
    a = of_bfloat16(*(numbers.get(k, 0.0) for k in range(32)))[None]
    b, sums = of_bfloat16(*[1.0] * 32)[:, None], np.array([[before]], np.float32)
    got = product(a, b, sums, core=core)
    assert got.view(np.int32).tolist() == np.array([[expected]], np.float32).view(np.int32).tolist()


def test_a_tensor_core_has_the_bits_it_had() -> None:
    """A golden: another digest means another arithmetic."""
    generator = np.random.Generator(np.random.PCG64(7))
    a, b = (generator.standard_normal(shape, np.float32) for shape in ((9, 64), (64, 7)))
    sums = generator.standard_normal((9, 7), np.float32)
    halves = [(each.view(np.uint32) >> 16).astype(np.uint16) for each in (a, b)]
    bits = [zlib.crc32(product(*halves, sums, core=core).tobytes()) for core in (HOPPER, AMPERE)]
    assert bits == [4073122637, 3317112151]


def test_numbers_that_are_none_spread() -> None:
    a, b = of_bfloat16(*[1.0] * 16)[None], of_bfloat16(*[1.0] * 15, math.inf)[:, None]
    for before, expected in ((0.0, math.inf), (-math.inf, math.nan)):
        got = product(a, b, np.array([[before]], np.float32))
        np.testing.assert_equal(got, np.array([[expected]], np.float32))
