"""Hidden states in several streams on a device: near the arithmetic of arrays, and bits of a row that others leave."""

import math

import numpy as np
import pytest
import torch

from core.models.operations.cpu_streams import CpuStreams
from core.models.operations.tensor import Operation
from core.models.operations.triton_streams import TritonStreams
from kernels.cpu.library import load_cpu_library
from kernels.elements import BFLOAT16, FLOAT32, Dtype, to_floats
from kernels.torch.tensors import DTYPES, to_array, to_tensor
from tests.triton_device import ANYWHERE, DEVICE

pytestmark = ANYWHERE

ROWS, WIDTH = 3, 72


def random(*shape: int, seed: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def on_device(numbers: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> torch.Tensor:
    return to_tensor(numbers).to(DEVICE)


def near(found: torch.Tensor, expected: object, tolerance: float = 2e-6) -> None:
    np.testing.assert_allclose(found.float().cpu().numpy(), np.asarray(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("count", "active"), [(4, 0), (3, 1)])
def test_layers_predict_and_correct_all_streams(count: int, active: int) -> None:
    ours, theirs = TritonStreams(torch.float32, DEVICE), CpuStreams(load_cpu_library(), FLOAT32)
    given = random(count, count, count), random(count, count, seed=1), active, random(WIDTH, seed=2)
    mine, host = ours.mixer(*given), theirs.mixer(*given)
    streams, routed = random(count, ROWS, WIDTH, seed=3), random(ROWS, count, seed=4) * 2
    found, expected = mine.predict(on_device(streams), on_device(routed)), host.predict(list(streams), routed.copy())
    near(found, expected, 1e-5)
    after = random(ROWS, WIDTH, seed=5)
    corrected = mine.correct(found, on_device(routed), on_device(after))
    again = host.correct(expected, routed.copy(), after)
    near(corrected, again, 1e-5)
    near(mine.gated(corrected), host.gated(again), 1e-5)
    near(ours.with_added(corrected, on_device(after)), theirs.with_added(again, after), 1e-5)
    alone = mine.predict(on_device(streams[:, 1:2].copy()), on_device(routed[1:2]))
    assert torch.equal(alone, found[:, 1:2]), "other rows change a row's bits"
    assert mine.predict(on_device(streams[:, :0].copy()), on_device(routed[:0])).shape == (count, 0, WIDTH)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_streams_have_the_size_of_the_first_one(dtype: Dtype) -> None:
    """A stream of nearly nothing is not made as large."""
    ours, theirs = TritonStreams(DTYPES[dtype], DEVICE), CpuStreams(load_cpu_library(), dtype)
    factors = [random(WIDTH, WIDTH, seed=seed) for seed in (1, 2)]
    factors[1][:] *= 1e-9

    def products(*, here: bool) -> list[Operation]:
        if here:
            return [lambda x, factor=factor: x.float() @ on_device(factor).T for factor in factors]
        return [lambda x, factor=factor: to_floats(x) @ factor.T for factor in factors]

    hidden = random(ROWS, WIDTH)
    found, expected = ours.begin(on_device(hidden), products(here=True)), theirs.begin(hidden, products(here=False))
    near(found, expected, 1e-5)
    sizes = found.square().mean(2).sqrt().cpu()
    torch.testing.assert_close(sizes[1], sizes[0])
    assert sizes[2].max() < 1e-4
    near(ours.end(found, products(here=True)), theirs.end(expected, products(here=False)), 1e-5)


def test_attention_the_learned_residual_and_the_stream_are_joined() -> None:
    parts = [random(ROWS, WIDTH, seed=seed) for seed in range(4)]
    theirs = CpuStreams(load_cpu_library(), FLOAT32).joined(*parts)
    found = TritonStreams(torch.float32, DEVICE).joined(*map(on_device, parts))
    assert np.array_equal(to_array(found.cpu()), theirs)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize(("width", "num_deviations"), [(136, 1.2815516), (40, 0.0)])
def test_the_largest_gates_count(dtype: Dtype, width: int, num_deviations: float) -> None:
    gate, up = random(ROWS, width), random(ROWS, width, seed=1)
    own = TritonStreams(DTYPES[dtype], DEVICE).sparse_gate(num_deviations)
    found = own(on_device(gate), on_device(up))
    expected = to_floats(CpuStreams(load_cpu_library(), dtype).sparse_gate(num_deviations)(gate, up))
    near(found, expected, 1e-6 if dtype == FLOAT32 else 2.0**-7)
    assert found.dtype == DTYPES[dtype]
    share = float((found != 0).float().mean())
    assert abs(share - (0.1 if num_deviations else 0.5)) < 0.1
    gate[1, 3] = math.nan
    with_nan = own(on_device(gate), on_device(up))
    assert with_nan[1].isnan().all()
    assert torch.equal(with_nan[0], found[0])
