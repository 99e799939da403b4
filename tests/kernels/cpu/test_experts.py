"""Routed MLPs of the C kernel against their definition in NumPy, and a row's bits, which are its own."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ipc.tables.arrays import Floats
from kernels.cpu.decoder_parts import DenseParts
from kernels.cpu.experts import CpuExperts
from kernels.cpu.gemm import PackedMatrix, SecondForm, pack
from kernels.cpu.library import CpuLibrary, load_cpu_library
from kernels.cpu.quantized import BlockRows, in_q8_0, quantize
from kernels.elements import BFLOAT16, FLOAT32, Dtype, Numbers, rounded, to_floats
from kernels.routing import Routing

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

    def matrix(self, library: CpuLibrary, weight: Numbers, in_8_bits: bool, **options: Any) -> PackedMatrix:
        if not in_8_bits:
            return PackedMatrix(library, weight, dtype=self.dtype, **options)
        name = "BF16" if self.dtype == BFLOAT16 else "F32"
        blocks = in_q8_0(library, BlockRows(name, weight.view(np.uint8)))
        assert blocks is not None
        stored = quantize(library, [blocks], is_gated="gate" in options, in_8_bits=True)
        assert stored is not None
        return PackedMatrix(library, stored, dtype=self.dtype, **options)

    def packed(
        self, library: CpuLibrary, *, normalises: bool = True, in_8_bits: bool = False, scales_inputs: bool = False
    ) -> CpuExperts:
        def matrix(weight: Numbers, **options: Any) -> PackedMatrix:
            return self.matrix(library, weight, in_8_bits, **options)

        return CpuExperts(
            library,
            PackedMatrix(library, self.router, dtype=self.dtype, out_dtype=FLOAT32),
            [
                DenseParts(matrix(gate_up, gate="silu"), matrix(down, out_dtype=FLOAT32))
                for gate_up, down in zip(self.gate_up, self.down, strict=True)
            ],
            Routing(CHOSEN, normalises, scales_inputs=scales_inputs),
        )

    def defined(self, x: Numbers, *, normalises: bool, scales_inputs: bool = False) -> Floats:
        """The definition, in float64 but for the rounding of the activation's result."""
        rows = to_floats(x).astype(np.float64)
        logits = rows @ to_floats(self.router).astype(np.float64).T
        out = np.zeros_like(rows)
        for row, numbers in enumerate(logits):
            chosen = sorted(np.argsort(-numbers, kind="stable")[:CHOSEN].tolist())
            weights = np.exp(numbers - numbers.max())
            weights /= weights[chosen].sum() if normalises else weights.sum()
            for expert in chosen:
                own = rows[row]
                if scales_inputs:
                    own = to_floats(rounded((own * weights[expert]).astype(np.float32), self.dtype)).astype(np.float64)
                    weights[expert] = 1
                gate, up = np.split(to_floats(self.gate_up[expert]).astype(np.float64) @ own, 2)
                gated = to_floats(rounded((gate / (1 + np.exp(-gate)) * up).astype(np.float32), self.dtype))
                out[row] += weights[expert] * (to_floats(self.down[expert]).astype(np.float64) @ gated)
        return out.astype(np.float32)


class TwoForms(Weights):
    """Matrices in the form for few rows, next to zeros in the form for many; or in the first form only."""

    def __init__(self, *, has_zeros: bool) -> None:
        super().__init__(BFLOAT16)
        self.has_zeros = has_zeros

    def matrix(self, library: CpuLibrary, weight: Numbers, in_8_bits: bool, **options: Any) -> PackedMatrix:
        blocks = in_q8_0(library, BlockRows("BF16", weight.view(np.uint8)))
        assert blocks is not None
        stored = quantize(library, [blocks], is_gated="gate" in options)
        assert stored is not None
        if not self.has_zeros:
            return PackedMatrix(library, stored, **options)
        zeros = pack(library, np.zeros_like(weight), is_gated="gate" in options)
        return PackedMatrix(library, stored, second=SecondForm(zeros), **options)


def rows_of(count: int, dtype: Dtype) -> Numbers:
    return rounded(np.random.default_rng(count).standard_normal((count, WIDTH), np.float32), dtype)


@pytest.fixture
def library() -> Iterator[CpuLibrary]:
    library = load_cpu_library()
    yield library
    library.stop_threads()


@pytest.mark.parametrize(("normalises", "scales_inputs"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_the_result_is_that_of_the_definition(
    dtype: Dtype, normalises: bool, scales_inputs: bool, library: CpuLibrary
) -> None:
    weights, x = Weights(dtype), rows_of(20, dtype)
    got = to_floats(weights.packed(library, normalises=normalises, scales_inputs=scales_inputs)(x))
    expected = weights.defined(x, normalises=normalises, scales_inputs=scales_inputs)
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
        [
            DenseParts(
                PackedMatrix(library, first, gate_up, dtype=dtype, gate="clamped_silu"),
                PackedMatrix(library, second, down, dtype=dtype, out_dtype=FLOAT32),
            )
            for first, second in zip(weights.gate_up, weights.down, strict=True)
        ],
        Routing(CHOSEN, normalises=True),
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


def test_an_expert_with_few_rows_reads_the_stored_form(library: CpuLibrary) -> None:
    both, alone = (TwoForms(has_zeros=has_zeros).packed(library) for has_zeros in (True, False))
    x = rows_of(300, BFLOAT16)
    assert to_floats(alone(x)).any(1).all()
    assert both(x[:1]).tobytes() == alone(x[:1]).tobytes()
    assert not to_floats(both(x)).any()


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


#: Of routing.h: what each part of it changes.
ROUTINGS = {
    "softmax of all, scaled": {"normalises": False, "scaling": 2.5},
    "sigmoids": {"normalises": False, "is_sigmoid": True},
    "sigmoids that sum to the scaling": {"normalises": True, "is_sigmoid": True, "scaling": 1.5},
    "corrected sigmoids": {"normalises": True, "is_sigmoid": True, "correction": True},
    "corrected softmax": {"normalises": True, "correction": True},
    "groups by their largest": {"normalises": False, "num_groups": 4, "num_chosen_groups": 2},
    "groups by two, corrected": {
        "normalises": True,
        "is_sigmoid": True,
        "correction": True,
        "num_groups": 4,
        "num_chosen_groups": 2,
        "best_of_group": 2,
    },
}


def chosen_by_definition(logits: Floats, routing: Routing) -> dict[int, float]:
    """The experts of one row and their weights, in float64."""
    numbers = logits.astype(np.float64)
    scores = 1 / (1 + np.exp(-numbers)) if routing.is_sigmoid else np.exp(numbers) / np.exp(numbers).sum()
    keys = scores if routing.correction is None else scores + routing.correction
    groups = keys.reshape(routing.num_groups, -1)
    best = np.sort(groups, axis=1)[:, -routing.best_of_group :].sum(1)
    allowed = np.argsort(-best, kind="stable")[: routing.num_chosen_groups]
    keys = np.concatenate([one if place in allowed else one * 0 - np.inf for place, one in enumerate(groups)])
    chosen = sorted(np.argsort(-keys, kind="stable")[: routing.num_chosen].tolist())
    total = scores[chosen].sum() if routing.normalises else 1.0
    return {expert: scores[expert] / total * routing.scaling for expert in chosen}


@pytest.mark.parametrize("name", ROUTINGS)
def test_experts_are_chosen_and_weighted_by_the_definition(name: str, library: CpuLibrary) -> None:
    """Each expert yields its own number, so the result names the experts and their weights."""
    rng, count = np.random.default_rng(11), 12
    router = rng.standard_normal((count, WIDTH), np.float32) * np.float32(0.3)
    settings: dict[str, Any] = dict(ROUTINGS[name])
    if settings.get("correction"):
        settings["correction"] = rng.standard_normal(count).astype(np.float32)
    routing = Routing(CHOSEN, **settings)
    experts = CpuExperts(
        library,
        PackedMatrix(library, router, dtype=FLOAT32, out_dtype=FLOAT32),
        [yields(library, np.eye(WIDTH, dtype=np.float32)[number]) for number in range(count)],
        routing,
    )
    x = rows_of(50, FLOAT32)
    for row, got in zip(x, experts(x), strict=True):
        expected = np.zeros(WIDTH)
        for expert, weight in chosen_by_definition(router @ row, routing).items():
            expected[expert] = weight
        assert np.abs(got - expected).max() <= 2e-6 * max(1.0, routing.scaling)


def yields(library: CpuLibrary, result: Floats) -> DenseParts:
    """An expert whose result is always this: its bias."""
    zeros = np.zeros((2 * SIZE, WIDTH), np.float32)
    gate_up = PackedMatrix(library, zeros, dtype=FLOAT32, gate="silu")
    return DenseParts(
        gate_up, PackedMatrix(library, zeros[:WIDTH, :1].repeat(SIZE, 1), result, dtype=FLOAT32, out_dtype=FLOAT32)
    )


@pytest.mark.parametrize("in_8_bits", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("has_gate", [False, True], ids=["whole", "gated"])
def test_a_shared_expert_joins_every_row(has_gate: bool, in_8_bits: bool, library: CpuLibrary) -> None:
    """It has another size than the others. The sum is theirs and its own; a row's bits are its own, in any number."""
    weights, rng = Weights(FLOAT32), np.random.default_rng(4)
    gate = rng.standard_normal((1, WIDTH), np.float32)
    gate_up, down = (rng.standard_normal(shape, np.float32) * np.float32(0.1) for shape in ((320, WIDTH), (WIDTH, 160)))
    plain = weights.packed(library, in_8_bits=in_8_bits)
    shared = DenseParts(
        weights.matrix(library, gate_up, in_8_bits, gate="silu"),
        weights.matrix(library, down, in_8_bits, out_dtype=FLOAT32),
    )
    router = np.concatenate([weights.router, gate]) if has_gate else weights.router
    packed = PackedMatrix(library, router, dtype=FLOAT32, out_dtype=FLOAT32)
    experts = CpuExperts(library, packed, plain.experts, Routing(CHOSEN, True, has_shared_gate=has_gate), shared=shared)
    x = rows_of(700, FLOAT32)
    share = 1 / (1 + np.exp(-(x @ gate.T))) if has_gate else 1.0
    expected = plain(x) + share * shared.down(shared.gate_up(x))
    alone = np.concatenate([experts(x[row : row + 1]) for row in range(20)])
    for num_threads in (1, 2):
        library.start_threads(num_threads)
        got = experts(x)
        assert np.abs(got - expected).max() <= 2e-6 * np.abs(expected).max()
        assert got[:20].tobytes() == alone.tobytes()
        assert experts(x[:7]).tobytes() == alone[:7].tobytes()
