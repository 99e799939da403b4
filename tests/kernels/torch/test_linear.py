"""TorchLinear: right within rounding, with every product that this build of torch has. Nothing is promised of bits."""

import pytest
import torch

import kernels.torch.linear
from kernels.torch.linear import TorchLinear, plain_product, prepacked_product

DTYPES = [torch.float32, torch.bfloat16]


def numbers(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 9, 600])
def test_equals_the_exact_product(dtype, num_rows):
    weight, bias = numbers(96, 64, dtype=dtype), numbers(96, seed=2)
    x = numbers(num_rows, 64, dtype=dtype, seed=1)
    exact = x.double() @ weight.double().T
    near = {"rtol": 2**-7 if dtype == torch.bfloat16 else 1e-5, "atol": 2**-5 if dtype == torch.bfloat16 else 1e-5}
    for out_dtype in (None, torch.float32):
        got = TorchLinear(weight, out_dtype=out_dtype)(x)
        assert got.dtype == (out_dtype or dtype)
        assert got.shape == (num_rows, 96)
        assert torch.allclose(got.double(), exact, **near)
        biased = TorchLinear(weight, bias, out_dtype=out_dtype)(x)
        assert torch.allclose(biased.double(), exact + bias.double(), **near)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_products_are_right(dtype):
    weight, x = numbers(48, 64, dtype=dtype), numbers(7, 64, dtype=dtype, seed=1)
    exact = x.double() @ weight.double().T
    assert torch.allclose(plain_product(weight)(x).double(), exact, rtol=2**-7, atol=2**-5)
    try:
        product = prepacked_product(weight)
    except (RuntimeError, AttributeError):
        assert TorchLinear(weight).variant == "torch"
    else:
        assert torch.allclose(product(x).double(), exact, rtol=2**-7, atol=2**-5)
        assert TorchLinear(weight).variant == "torch-prepacked"


def test_a_product_that_this_build_lacks_is_passed_over(monkeypatch):
    def missing(weight):
        raise RuntimeError("mkldnn: unsupported")

    monkeypatch.setattr(kernels.torch.linear, "prepacked_product", missing)
    layer = TorchLinear(torch.eye(64))
    assert layer.variant == "torch"
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(layer(x), x)


def test_the_weight_is_not_kept(monkeypatch):
    """The weight may be a view of a mapped file."""
    weight = numbers(8, 16)
    layer, x = TorchLinear(weight), numbers(3, 16, seed=1)
    before = layer(x)
    weight.zero_()
    assert torch.equal(layer(x), before)
