"""The arithmetic between products: near float64, and the same bits here and on a GPU."""

import zlib
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels.cpu.elementwise import cap_logits
from kernels.cpu.library import load_cpu_library
from kernels.rotary import rotary_frequencies
from kernels.torch import rope
from kernels.torch.tensors import to_tensor
from kernels.triton.arithmetic.caps import capped
from kernels.triton.arithmetic.elementary import (
    error_function,
    exp2_negative,
    exponential,
    hyperbolic_tangent,
    softplus,
)
from kernels.triton.arithmetic.rotary_tables import rotary_tables
from kernels.triton.arithmetic.sums import sum_of, sums_of_columns, sums_of_rows
from tests.interpreter import quick
from tests.triton_device import ANYWHERE, DEVICE

pytestmark = ANYWHERE


@triton.jit
def functions_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    numbers = tl.load(x + i)
    tl.store(out + i, exponential(numbers))
    tl.store(out + N + i, exp2_negative(-tl.abs(numbers)))
    tl.store(out + 2 * N + i, error_function(numbers))
    tl.store(out + 3 * N + i, softplus(numbers))
    tl.store(out + 4 * N + i, hyperbolic_tangent(numbers))
    tl.store(out + 5 * N + i, tl.div_rn(1.0, tl.sqrt_rn(tl.abs(numbers) + 0.1)))


def functions(x: torch.Tensor) -> torch.Tensor:
    """Return the results [6, N] of each function."""
    out = torch.empty(6, len(x), device=DEVICE)
    functions_kernel[(1,)](x.to(DEVICE), out, N=len(x))
    return out.cpu()


def numbers() -> torch.Tensor:
    """Of all sizes, most of them small."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.exp2(torch.randint(-20, 8, (4096,), generator=generator).float())
    return torch.randn(4096, generator=generator) * sizes


#: What a kernel must give for these numbers, here and on a GPU, by function.
DIGESTS = (3426297901, 2403015714, 3001547565, 2549213216, 937555563, 74759382)


def test_functions_have_their_bits_and_are_near_float64() -> None:
    x = numbers()
    found = functions(x)
    assert tuple(zlib.crc32(row.numpy().tobytes()) for row in found) == DIGESTS
    inside = (x > -87) & (x < 88)
    exact = x.double()
    softplus_of = torch.nn.functional.softplus(exact, threshold=1000)
    expected = torch.exp(exact), torch.exp2(-exact.abs()), torch.erf(exact), softplus_of, torch.tanh(exact)
    bounds = 4e-7, 2e-7, 5e-7, 3e-7, 3e-7
    for row, right, bound in zip(found, expected, bounds, strict=False):
        chosen = inside & (right.abs() > 2.0**-120)
        assert ((row.double() / right - 1)[chosen].abs() < bound).all(), (row.double() / right - 1)[chosen].abs().max()


def test_functions_at_their_ends() -> None:
    x = torch.tensor([0.0, torch.nan, 1e4, -1e4, torch.inf, -torch.inf, 126.75, -0.0])
    exponentials, powers, errors, logarithms, tangents, _ = functions(x)
    assert exponentials[[0, 7]].tolist() == [1, 1]
    assert exponentials[2] == exponentials[4] == np.float32(1.6516363e38)
    assert 0 < exponentials[3] == exponentials[5] < 2e-38
    assert powers.nan_to_num(9).tolist() == [1, 9, 0, 0, 0, 0, 0, 1]
    assert errors[2:6].tolist() == [1, -1, 1, -1]
    assert logarithms[[0, 2, 3]].tolist() == [np.float32(np.log(2)), 1e4, pytest.approx(0, abs=1e-37)]
    assert tangents[2:7].tolist() == [1, -1, 1, -1, 1]
    assert torch.stack([exponentials, powers, errors, logarithms, tangents])[:, 1].isnan().all()


def test_caps_are_those_of_the_c_kernels() -> None:
    x = numbers().view(64, 64)
    expected, given = x.numpy().copy(), x.to(DEVICE, copy=True)
    cap_logits(load_cpu_library(), expected, 30.0)
    assert capped(given, 30.0) is given
    np.testing.assert_allclose(given.cpu().numpy(), expected, rtol=3e-7, atol=0)
    assert capped(given[:0], 30.0).shape == (0, 64)


@triton.jit
def sums_kernel(x, out, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    table = tl.load(x + m[:, None] * N + n[None, :])
    tl.store(out + m, sums_of_rows(table))
    tl.store(out + M + n, sums_of_columns(table))
    row = tl.load(x + n)
    tl.store(out + M + N, sum_of(row))


def halved(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The sums of columns, each of which halves itself."""
    while len(rows) > 1:
        rows = rows[: len(rows) // 2] + rows[len(rows) // 2 :]
    return rows[0]


@pytest.mark.parametrize("is_quick", [False, True])
@pytest.mark.parametrize(("m", "n"), [(1, 64), (2, 2), (16, 128), (64, 8)])
def test_sums_have_the_order_of_their_definition(
    m: int, n: int, is_quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So have those that other tests take in their place."""
    if not is_quick:
        monkeypatch.setattr(quick, "SUMS", {})
    x = np.random.default_rng(m).standard_normal((m, n)).astype(np.float32) * np.exp2(
        np.arange(n, dtype=np.float32) % 20
    )
    out = torch.empty(m + n + 1, device=DEVICE)
    sums_kernel[(1,)](torch.from_numpy(x).to(DEVICE), out, M=m, N=n)
    assert out.tolist() == [*halved(x.T.copy()), *halved(x), halved(x[0])]


@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_rotary_tables_are_those_of_the_definition(factor: float) -> None:
    """At positions of a prompt, of padding, and far away; a frequency of 0 does not rotate."""
    positions = torch.tensor([*range(20), -1, 90, 4_000, 131_071, 999_999])
    frequencies = to_tensor(rotary_frequencies(80, 1e4))
    frequencies[3] = 0
    expected = rope.rotary_tables(positions, frequencies, factor)
    for kind in (torch.int32, torch.int64):
        found = rotary_tables(positions.to(DEVICE, kind), frequencies.to(DEVICE), factor)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours.cpu(), theirs)
    assert [len(each) for each in rotary_tables(positions[:0].to(DEVICE), frequencies.to(DEVICE))] == [0, 0]
