"""Low-rank adapters on a device: near their definition in float64, and no bit depends on other tokens."""

import numpy as np
import pytest
import torch

from kernels.elements import BFLOAT16, FLOAT32, Dtype
from kernels.low_rank import LowRank, ProductShape
from kernels.torch.tensors import DTYPES
from kernels.triton import lora
from kernels.triton.lora import TritonAdapter, adapter_bytes, add_adapters, lora_work
from tests.triton_device import ANYWHERE, DEVICE

pytestmark = ANYWHERE

SHAPES = [ProductShape(72, (40, 24, 24)), ProductShape(40, (72,)), ProductShape(24, (48, 48), is_gated=True)]


def made(seed: int, ranks: list[list[int]]) -> list[list[LowRank | None]]:
    """ranks: of each part of each product; 0 = none."""
    draw = np.random.default_rng(seed)
    return [
        [
            LowRank(
                (draw.standard_normal((rank, shape.depth)) * shape.depth**-0.5).astype(np.float32),
                draw.standard_normal((size, rank)).astype(np.float32),
                0.75,
            )
            if rank
            else None
            for rank, size in zip(of_parts, shape.parts, strict=True)
        ]
        for of_parts, shape in zip(ranks, SHAPES, strict=True)
    ]


ADAPTERS = [made(1, [[8, 0, 5], [21], [3, 3]]), made(2, [[0, 16, 0], [0], [16, 1]]), made(3, [[1, 1, 1], [4], [0, 0]])]


def exact(x: torch.Tensor, parts: list[LowRank | None], sizes: tuple[int, ...]) -> torch.Tensor:
    """What an adapter adds to a product, in float64. Its matrices are rounded to x's type, as the model's are."""

    def matrix(numbers: object) -> torch.Tensor:
        return torch.from_numpy(numbers).to(DEVICE, x.dtype).double()

    columns = [
        x.new_zeros(len(x), size, dtype=torch.float64)
        if part is None
        else (x.double() @ matrix(part.a).T * part.scale) @ matrix(part.b).T
        for part, size in zip(parts, sizes, strict=True)
    ]
    return torch.cat(columns, 1)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_each_token_gets_what_its_adapter_adds(dtype: Dtype) -> None:
    packed = [TritonAdapter(SHAPES, products, dtype, DEVICE) for products in ADAPTERS]
    draw = np.random.default_rng(7)
    of_token = draw.integers(-1, len(packed), 70)  # more tokens than small tiles are for
    assert np.unique(of_token).tolist() == [-1, 0, 1, 2]
    work = lora_work(packed, of_token, DEVICE)
    assert work.tokens.shape[1] == 64 if (of_token >= 0).sum() > 64 else 16
    for number, shape in enumerate(SHAPES):
        x = torch.randn(len(of_token), shape.depth, generator=torch.Generator().manual_seed(number))
        x = x.to(DEVICE, DTYPES[dtype])
        before = torch.randn(len(x), sum(shape.parts), generator=torch.Generator().manual_seed(9)).to(x)
        add_adapters(x, y := before.clone(), work, number)
        expected = before.double()
        for index, products in enumerate(ADAPTERS):
            own = torch.from_numpy(of_token == index)
            expected[own] += exact(x, products[number], shape.parts)[own]
        tolerance = 1e-5 if dtype == FLOAT32 else 2**-8
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
        changed = {index for index, products in enumerate(ADAPTERS) if any(products[number])}
        same = torch.from_numpy(~np.isin(of_token, list(changed)))
        assert torch.equal(y[same], before[same])
        for token in (0, 13, 69):  # alone, and in small tiles
            alone = lora_work(packed, of_token[token : token + 1], DEVICE)
            add_adapters(x[token : token + 1], one := before[token : token + 1].clone(), alone, number)
            assert torch.equal(one, y[token : token + 1])


def test_the_work_has_each_token_once_in_a_tile_of_its_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "TILE_TOKENS", {4: 2, 100: 3})
    packed = [TritonAdapter(SHAPES, products, FLOAT32, DEVICE) for products in ADAPTERS]
    work = lora_work(packed, np.array([2, -1, 0, 2, 2, -1, 0, 2]), DEVICE)
    assert work.tokens.tolist() == [[2, 6, -1], [0, 3, 4], [7, -1, -1]]
    assert work.adapters.tolist() == [0, 2, 2]
    assert work.most == [16, 32, 32], "ranks in steps of 16"
    few = lora_work(packed, np.array([1, 1, 0]), DEVICE)
    assert (few.tokens.tolist(), few.adapters.tolist()) == ([[2, -1], [0, 1]], [0, 1])
    assert few.ranks.tolist() == [[16, 16, 16], [32, 0, 16], [16, 32, 0]]


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("rank", [16, 21])
def test_the_largest_adapter_has_the_bytes_that_are_kept_for_it(rank: int, dtype: Dtype) -> None:
    whole = made(1, [[rank] * len(shape.parts) for shape in SHAPES])
    assert TritonAdapter(SHAPES, whole, dtype, DEVICE).num_bytes == adapter_bytes(SHAPES, rank, dtype)
