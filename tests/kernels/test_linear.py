"""PackedLinear: right, row-invariant bit for bit, and built on a probe that sees what it must."""

import math

import numpy as np
import pytest
import torch

import kernels.linear
from kernels.linear import ROW_COUNTS, PackedLinear, padded_rows, probe, probe_inputs

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def no_remembered_choices():
    kernels.linear._choose.cache_clear()
    yield
    kernels.linear._choose.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), [(192, 64), (960, 576), (576, 1536), (100, 75)])
def test_a_row_has_the_same_bits_among_any_others(dtype, out_features, in_features, threads, library):
    generator = torch.Generator().manual_seed(0)
    row, weight = probe_inputs(out_features, in_features, dtype)
    x = torch.randn(700, in_features, generator=generator).to(dtype)
    x[::3] = row  # rows whose result shows every change in the order of summation
    results = {}
    for num_threads in (1, 2):
        threads(num_threads)
        if library is not None:
            library.start_threads(num_threads)
        layer = PackedLinear(weight, library=library)
        whole = layer(x)
        for count in (*range(1, 18), 31, 33, 64, 100, 200, 511, 512, 513)[::num_threads]:
            assert torch.equal(layer(x[:count].contiguous()), whole[:count]), count
            assert torch.equal(layer(x[700 - count :].contiguous()), whole[700 - count :]), count
        results[num_threads] = whole
    assert torch.equal(results[1], results[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 9, 600])
def test_equals_the_exact_product(dtype, num_rows, library):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    x = torch.randn(num_rows, 64, generator=generator).to(dtype)
    exact = x.double() @ weight.double().T
    for out_dtype in (None, torch.float32):
        got = PackedLinear(weight, library=library, out_dtype=out_dtype)(x)
        assert got.dtype == (out_dtype or dtype)
        assert got.shape == (num_rows, 96)
        assert torch.allclose(got.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_variant_depends_on_shape_and_dtype_alone(library):
    weight = torch.randn(96, 64)
    assert PackedLinear(weight, library=library).variant == PackedLinear(weight + 1, library=library).variant
    assert PackedLinear(weight.bfloat16(), library=library).variant != PackedLinear(weight, library=library).variant


def test_variant_says_whose_product_it_is(c_library):
    weight = torch.randn(96, 64)
    assert PackedLinear(weight, library=c_library).variant.startswith(f"c-{c_library.variant}[any]:")
    assert PackedLinear(weight).variant != PackedLinear(weight, library=c_library).variant


def test_padded_rows():
    assert [padded_rows(rows, (4, 8, 32)) for rows in (0, 1, 4, 5, 9, 32, 33, 70)] == [0, 4, 4, 8, 32, 32, 36, 72]
    assert [padded_rows(rows, ()) for rows in (0, 1, 33)] == [0, 1, 33]


def two_orders(weight, is_other):
    """A product that sums K backwards where is_other(row index, number of rows), else forwards; in float32."""

    def operation(x):
        terms = x.float().numpy()[:, None] * weight.float().numpy()
        other = np.array([is_other(row, len(x)) for row in range(len(x))], bool)
        # torch's cumsum of float32 is kept in float64: it would round neither way.
        forwards, backwards = np.cumsum(terms, -1)[..., -1], np.cumsum(terms[..., ::-1], -1)[..., -1]
        return torch.from_numpy(np.where(other[:, None], backwards, forwards)).to(weight.dtype)

    return operation


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_probe_sees_another_order_of_summation(dtype):
    """Also in bfloat16, whose rounding hides it from a probe with ordinary numbers."""
    row, weight = probe_inputs(64, 144, dtype)
    other_when_few = probe("few", two_orders(weight, lambda _, rows: rows < 16), row, ROW_COUNTS)
    assert other_when_few.row_counts == tuple(count for count in ROW_COUNTS if count >= 16)
    other_when_many = probe("many", two_orders(weight, lambda _, rows: rows > 128), row, ROW_COUNTS)
    assert other_when_many.row_counts == tuple(count for count in ROW_COUNTS if count <= 128)
    hole = probe("hole", two_orders(weight, lambda _, rows: rows == 48), row, ROW_COUNTS)
    assert hole.row_counts == tuple(count for count in ROW_COUNTS if count != 48)
    never = probe("never", two_orders(weight, lambda *_: False), row, ROW_COUNTS)
    assert never.row_counts == ROW_COUNTS
    assert never.signature != probe("always", two_orders(weight, lambda *_: True), row, ROW_COUNTS).signature


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_probe_sees_a_row_that_depends_on_its_position(dtype):
    row, weight = probe_inputs(64, 144, dtype)
    assert probe("last", two_orders(weight, lambda index, rows: index == rows - 1), row, ROW_COUNTS) is None
    tail = probe("tail", two_orders(weight, lambda index, rows: rows % 16 and index >= rows - 8), row, (16, 24, 32))
    assert tail.row_counts == (16, 32)


def test_ordinary_numbers_would_not_show_it_in_bfloat16():
    """Why the probe needs its own numbers."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 144, generator=generator).bfloat16()
    row = torch.randn(1, 144, generator=generator).bfloat16()
    blind = probe("few", two_orders(weight, lambda _, rows: rows < 16), row, ROW_COUNTS)
    assert blind.row_counts == ROW_COUNTS


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_kernel_that_is_not_invariant_is_not_used(dtype, monkeypatch, no_remembered_choices):
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    few = {"bad": lambda w: two_orders(w, lambda _, rows: rows <= 8), "good": kernels.linear._plain}
    monkeypatch.setattr(kernels.linear, "KERNELS", few)
    layer = PackedLinear(weight)
    assert layer.variant.startswith("good")

    monkeypatch.setattr(kernels.linear, "KERNELS", {"linear": lambda w: two_orders(w, lambda index, _: index % 2)})
    kernels.linear._choose.cache_clear()
    alone = PackedLinear(weight)  # nothing is invariant: rows run one at a time
    assert alone.chosen.row_counts == (1,)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(alone(x), torch.cat([alone(x[index : index + 1]) for index in range(9)]))


def test_a_kernel_this_build_lacks_is_passed_over(monkeypatch, no_remembered_choices):
    def missing(weight):
        raise RuntimeError("mkldnn: unsupported")

    monkeypatch.setattr(kernels.linear, "KERNELS", {"onednn-prepacked": missing, "linear": kernels.linear._plain})
    layer = PackedLinear(torch.eye(64))
    assert layer.variant.startswith("linear")
    x = torch.randn(3, 64)
    assert torch.equal(layer(x), x)


def test_probe_inputs_are_exact_and_cancel():
    for dtype in DTYPES:
        row, weight = probe_inputs(70, 65, dtype)
        assert weight.shape == (70, 65)
        products = row.double() * weight.double()  # exact in float64
        assert [math.fsum(terms) for terms in products.tolist()] == [0.0] * 70
        assert (row != 0).sum() == 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bias_is_added_to_every_row_and_changes_no_order(dtype, library):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 24, generator=generator).to(dtype)
    bias = torch.randn(40, generator=generator)
    # torch rounds before it adds, the C kernel only after.
    plain = PackedLinear(weight, library=library, out_dtype=torch.float32 if library is not None else None)
    biased = PackedLinear(weight, bias, library)
    assert plain.variant == biased.variant
    for count in (1, 5, 30, 600):
        x = torch.randn(count, 24, generator=generator).to(dtype)
        assert torch.equal(biased(x), (plain(x).float() + bias).to(dtype))
