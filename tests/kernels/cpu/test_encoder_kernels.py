"""What encoders alone use of the C kernels: layer normalisation, gelu, rows for positions and kinds of tokens."""

import math

import numpy as np
import pytest

from ipc.tables.arrays import Doubles
from kernels.cpu.build import usable_variants
from kernels.cpu.embedding import CpuEmbedding
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.library import CpuLibrary, load_cpu_library
from kernels.cpu.norm import CpuNorm
from kernels.elements import BFLOAT16, FLOAT32, Dtype, rounded, to_floats

RNG = np.random.Generator(np.random.PCG64(3))
#: Relative error of one rounding, and of float32 sums.
TOLERANCE = {FLOAT32: 2e-6, BFLOAT16: 2**-8}


@pytest.fixture(params=usable_variants())
def library(request: pytest.FixtureRequest) -> CpuLibrary:
    return load_cpu_library(request.param)


def layer_norm(x: Doubles, weight: Doubles, bias: Doubles | float) -> Doubles:
    x = x - x.mean(1, keepdims=True)
    normed: Doubles = x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * weight + bias
    return normed


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("width", [1, 7, 33, 96, 384])
def test_layer_norm(width: int, dtype: Dtype, library: CpuLibrary) -> None:
    hidden, x = RNG.standard_normal((2, 20, width), np.float32) * 3 + 2
    weight, bias = RNG.standard_normal((2, width), np.float32)
    for has_bias in (False, True):
        own = bias if has_bias else None
        plain = CpuNorm(library, weight, 1e-5, dtype, bias=own, is_centred=True)
        replacing = CpuNorm(library, weight, 1e-5, dtype, bias=own, is_centred=True, replaces=True)
        exact = layer_norm((hidden + x).astype(np.float64), weight, bias if has_bias else 0.0)
        added, replaced = hidden.copy(), hidden.copy()
        found = plain.after(added, x)
        assert (added == hidden + x).all()
        assert replacing.after(replaced, x).tobytes() == found.tobytes()
        assert rounded(replaced, dtype).tobytes() == found.tobytes()
        np.testing.assert_allclose(to_floats(found), exact, rtol=TOLERANCE[dtype], atol=2e-6)
        for row in (0, 7, 19):
            assert plain(added[row : row + 1]).tobytes() == found[row : row + 1].tobytes()


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("columns", [5, 64, 70])
def test_gelu_of_a_product(columns: int, dtype: Dtype, library: CpuLibrary) -> None:
    """The product hands its bias through: its weights are zero."""
    bias = np.linspace(-9, 9, columns).astype(np.float32)
    weight = rounded(np.zeros((columns, 16), np.float32), dtype)
    x = rounded(np.ones((9, 16), np.float32), dtype)
    for name, exact in (("gelu", _gelu), ("gelu_pytorch_tanh", _gelu_tanh)):
        found = to_floats(PackedMatrix(library, weight, bias, activation=name)(x))
        right = np.array([exact(value) for value in bias.tolist()])
        assert (found == found[0]).all()
        np.testing.assert_allclose(found[0], right, rtol=TOLERANCE[dtype], atol=3e-6)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_gelu_as_a_gate(dtype: Dtype, library: CpuLibrary) -> None:
    gates, up = np.linspace(-6, 6, 40), 0.5 + RNG.random(40)
    weight = rounded(np.concatenate([gates, up]).astype(np.float32)[:, None], dtype)
    found = to_floats(PackedMatrix(library, weight, gate="gelu")(rounded(np.ones((3, 1), np.float32), dtype)))
    gates, up = np.split(to_floats(weight)[:, 0].astype(np.float64), 2)
    right = np.array([_gelu(gate) for gate in gates.tolist()]) * up
    np.testing.assert_allclose(found, np.stack([right] * 3), rtol=TOLERANCE[dtype], atol=3e-6)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_xielu_with_the_constants_of_a_layer(dtype: Dtype, library: CpuLibrary) -> None:
    """Its two forms for x <= 0, a series and an exponential, and the limit just below 0."""
    bias = np.array([*np.linspace(-9, 4, 60), -0.5, -0.4999, -1e-3, -1e-6, -1e-7, 0.0, 1e-7, np.nan], np.float32)
    constants = np.array([0.7, 1.3, 0.5, -1e-6], np.float32)
    weight, x = rounded(np.zeros((len(bias), 16), np.float32), dtype), rounded(np.ones((9, 16), np.float32), dtype)
    found = to_floats(PackedMatrix(library, weight, bias, activation="xielu", constants=constants)(x))
    right = np.array([_xielu(value, *constants.tolist()) for value in bias.tolist()])
    assert (found[:, :-1] == found[0, :-1]).all()
    np.testing.assert_allclose(found[0], right, rtol=TOLERANCE[dtype], atol=3e-6 if dtype == BFLOAT16 else 3e-8)


def test_nan_stays_nan(library: CpuLibrary) -> None:
    bias = np.array([np.nan, 1.0, -np.inf, np.inf], np.float32)
    found = PackedMatrix(library, np.zeros((4, 8), np.float32), bias, activation="gelu")(np.ones((1, 8), np.float32))
    assert np.isnan(found[0, 0])
    assert found[0, 1] == pytest.approx(_gelu(1.0), rel=1e-6)
    assert found[0, 3] == np.inf


def test_rows_for_kinds_and_positions(library: CpuLibrary) -> None:
    table = RNG.standard_normal((50, 33), np.float32)
    kinds, places = RNG.standard_normal((2, 33), np.float32), RNG.standard_normal((9, 33), np.float32)
    ids, positions = np.array([3, 53, 99, 0]), np.array([0, 8, 4, 1])
    found = CpuEmbedding(library, table, kinds=kinds, places=places)(ids, positions)
    assert found.tobytes() == (table[ids % 50] + kinds[ids // 50] + places[positions]).tobytes()


def _gelu(x: float) -> float:
    return x * 0.5 * math.erfc(-x / math.sqrt(2))


def _xielu(x: float, positive: float, negative: float, beta: float, limit: float) -> float:
    return positive * x * x + beta * x if x > 0 else negative * (math.expm1(min(x, limit)) - x) + beta * x


def _gelu_tanh(x: float) -> float:
    return x * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
