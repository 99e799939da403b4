"""Routed MLPs of the C kernel against their definition in NumPy, and a row's bits, which are its own."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ipc.arrays import Floats
from kernels.cpu.experts import CpuExperts
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.library import CpuLibrary, load_cpu_library
from kernels.cpu.quantized import BlockRows, in_q8_0, quantize
from kernels.elements import BFLOAT16, FLOAT32, Dtype, Numbers, rounded, to_floats

WIDTH, SIZE, EXPERTS, CHOSEN = 64, 96, 7, 3


class Weights:
    """Random weights, as numbers of dtype."""

    def __init__(self, dtype: Dtype) -> None:
        rng = np.random.default_rng(3)

        def numbers(*shape: int) -> Numbers:
            return rounded(rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5), dtype)

        self.dtype, self.router = dtype, numbers(EXPERTS, WIDTH)
        self.gate_up = [numbers(2 * SIZE, WIDTH) for _ in range(EXPERTS)]
        self.down = [numbers(WIDTH, SIZE) for _ in range(EXPERTS)]
        #: Of the router, and of each expert's two products.
        self.biases = [rng.standard_normal(size, np.float32) for size in (EXPERTS, 2 * SIZE, WIDTH)]

    def packed(self, library: CpuLibrary, *, normalises: bool = True, in_8_bits: bool = False) -> CpuExperts:
        def matrix(weight: Numbers, **options: Any) -> PackedMatrix:
            if not in_8_bits:
                return PackedMatrix(library, weight, dtype=self.dtype, **options)
            name = "BF16" if self.dtype == BFLOAT16 else "F32"
            blocks = in_q8_0(library, BlockRows(name, weight.view(np.uint8)))
            assert blocks is not None
            stored = quantize(library, [blocks], is_gated="gate" in options)
            assert stored is not None
            return PackedMatrix(library, stored._replace(in_8_bits=True), dtype=self.dtype, **options)

        return CpuExperts(
            library,
            PackedMatrix(library, self.router, dtype=self.dtype, out_dtype=FLOAT32),
            [matrix(weight, gate="silu") for weight in self.gate_up],
            [matrix(weight, out_dtype=FLOAT32) for weight in self.down],
            CHOSEN,
            normalises=normalises,
        )

    def defined(self, x: Numbers, *, normalises: bool) -> Floats:
        """The definition, in float64 but for the rounding of the activation's result."""
        rows = to_floats(x).astype(np.float64)
        logits = rows @ to_floats(self.router).astype(np.float64).T
        out = np.zeros_like(rows)
        for row, numbers in enumerate(logits):
            chosen = sorted(np.argsort(-numbers, kind="stable")[:CHOSEN].tolist())
            weights = np.exp(numbers - numbers.max())
            weights /= weights[chosen].sum() if normalises else weights.sum()
            for expert in chosen:
                gate, up = np.split(to_floats(self.gate_up[expert]).astype(np.float64) @ rows[row], 2)
                gated = to_floats(rounded((gate / (1 + np.exp(-gate)) * up).astype(np.float32), self.dtype))
                out[row] += weights[expert] * (to_floats(self.down[expert]).astype(np.float64) @ gated)
        return out.astype(np.float32)


def rows_of(count: int, dtype: Dtype) -> Numbers:
    return rounded(np.random.default_rng(count).standard_normal((count, WIDTH), np.float32), dtype)


@pytest.fixture
def library() -> Iterator[CpuLibrary]:
    library = load_cpu_library()
    yield library
    library.stop_threads()


@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_the_result_is_that_of_the_definition(dtype: Dtype, normalises: bool, library: CpuLibrary) -> None:
    weights, x = Weights(dtype), rows_of(20, dtype)
    got = to_floats(weights.packed(library, normalises=normalises)(x))
    expected = weights.defined(x, normalises=normalises)
    assert np.abs(got - expected).max() <= (2e-6 if dtype == FLOAT32 else 2e-2) * np.abs(expected).max()


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_biases_and_clamped_gates(dtype: Dtype, library: CpuLibrary) -> None:
    """As gpt-oss has them; numbers go beyond both ends of the clamps. A row's bits are its own here, too."""
    weights, x = Weights(dtype), rows_of(40, dtype)
    weights.gate_up = [rounded(to_floats(each) * np.float32(4), dtype) for each in weights.gate_up]
    router, gate_up, down = weights.biases
    experts = CpuExperts(
        library,
        PackedMatrix(library, weights.router, router, dtype=dtype, out_dtype=FLOAT32),
        [PackedMatrix(library, each, gate_up, dtype=dtype, gate="clamped_silu") for each in weights.gate_up],
        [PackedMatrix(library, each, down, dtype=dtype, out_dtype=FLOAT32) for each in weights.down],
        CHOSEN,
        normalises=True,
    )
    expected, most = np.zeros(x.shape), 0.0
    for row, numbers in enumerate(to_floats(x).astype(np.float64)):
        logits = to_floats(weights.router) @ numbers + router
        chosen = np.argsort(-logits, kind="stable")[:CHOSEN]
        shares = np.exp(logits[chosen] - logits[chosen].max())
        for expert, share in zip(chosen, shares / shares.sum(), strict=True):
            both = to_floats(weights.gate_up[expert]).astype(np.float64) @ numbers + gate_up
            most = max(most, np.abs(both).max())
            gate, up = np.split(to_floats(rounded(both.astype(np.float32), dtype)).astype(np.float64), 2)
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
            gated = rounded((gate / (1 + np.exp(-1.702 * gate)) * (up + 1)).astype(np.float32), dtype)
            expected[row] += share * (to_floats(weights.down[expert]) @ to_floats(gated) + down)
    got = experts(x)
    assert most > 10
    assert np.abs(to_floats(got) - expected).max() <= (4e-6 if dtype == FLOAT32 else 2e-2) * np.abs(expected).max()
    assert b"".join(experts(x[row : row + 1]).tobytes() for row in range(len(x))) == got.tobytes()


@pytest.mark.parametrize("in_8_bits", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_a_rows_bits_are_its_own(dtype: Dtype, in_8_bits: bool, library: CpuLibrary) -> None:
    """Alone, among few, and among more rows than a batch has, with one thread and with two."""
    experts, x = Weights(dtype).packed(library, in_8_bits=in_8_bits), rows_of(1100, dtype)
    alone = np.concatenate([experts(x[row : row + 1]) for row in range(40)])
    for num_threads in (1, 2):
        library.start_threads(num_threads)
        for count in (2, 9, 40, 600, 1100):
            got = experts(x[:count])[:40]
            assert got.tobytes() == alone[: len(got)].tobytes(), (count, num_threads)


def test_weights_of_experts_that_nobody_chose_are_not_read(library: CpuLibrary) -> None:
    weights, x = Weights(FLOAT32), rows_of(1, FLOAT32)
    expected = weights.packed(library)(x)
    chosen = np.argsort(-(weights.router @ x[0]))[:CHOSEN]
    for expert in set(range(EXPERTS)) - set(chosen.tolist()):
        weights.gate_up[expert][:] = weights.down[expert][:] = np.nan
    assert weights.packed(library)(x).tobytes() == expected.tobytes()


def test_of_equal_experts_the_lower_number_is_chosen(library: CpuLibrary) -> None:
    weights, x = Weights(FLOAT32), rows_of(4, FLOAT32)
    weights.router[:] = weights.router[0]
    got = weights.packed(library)(x)
    for expert in range(CHOSEN, EXPERTS):
        weights.down[expert][:] = np.nan
    assert weights.packed(library)(x).tobytes() == got.tobytes()
    assert np.isfinite(got).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_nan_and_changes_no_other(bad: float, library: CpuLibrary) -> None:
    experts, x = Weights(FLOAT32).packed(library), rows_of(9, FLOAT32)
    expected = experts(x)
    x[4, 7] = bad
    got = experts(x)
    assert np.isnan(got[4]).all()
    assert np.delete(got, 4, 0).tobytes() == np.delete(expected, 4, 0).tobytes()
